"""The callers for Ray and Spark that docs/embed.md shows, on a local Ray and a local Spark."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

import coder_plugin
from coder_plugin.pretrained.export import export_model
from coder_plugin.search.embed import EmbedJob, embedded
from tests.documentation import ROOT, blocks
from tests.search.test_embed import content, write_shards

PAGE = ROOT / "docs" / "embed.md"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbedJob:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    torch.manual_seed(0)
    export_model(coder_plugin.create_model("coder-tiny", loss="dcl"), tmp_path / "model")
    data = write_shards(tmp_path)
    return EmbedJob(model=str(tmp_path / "model"), data=data, output=str(tmp_path / "e"), options={"workers": 0})


def check(job: EmbedJob) -> None:
    """The same files as this process makes."""
    assert len(embedded(job.output)) == 12
    alone = EmbedJob(model=job.model, data=job.data, output=f"{job.output}-alone", options=job.options)
    assert alone.run(shown=False).made == 3
    assert content(Path(job.output)) == content(Path(alone.output))


@pytest.mark.slow
def test_ray(job: EmbedJob) -> None:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
    try:
        [text] = [block.text for block in blocks(PAGE, "python") if "import ray" in block.text]
        exec(text.replace("num_gpus=1, concurrency=4", "num_cpus=1"), {"job": job})  # for a machine without a GPU
    finally:
        ray.shutdown()
    check(job)


@pytest.mark.slow
def test_spark(job: EmbedJob) -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql import SparkSession

    os.environ.pop("SPARK_REMOTE", None)
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        [text] = re.findall(r"`(context\.parallelize\(.+?)`", PAGE.read_text(encoding="utf-8"))
        exec(text, {"job": job, "context": session.sparkContext})
    finally:
        session.stop()
    check(job)
