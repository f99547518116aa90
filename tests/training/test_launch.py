"""What launchers ask for: ranks from SLURM's variables, one folder for all machines, and no form of training but DDP."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coder_plugin import CoderError, Trainer, distributed
from coder_plugin.config import TrainConfig
from coder_plugin.launchers import ranks_from_slurm
from coder_plugin.training import disk
from coder_plugin.training.accelerator import check_parallelism, make_accelerator
from tests import gloo
from tests.reliability import ranks as forked
from tests.reliability.rank_faults import options

forks = pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have imported torch")


def environment_of(*flags: str) -> dict[str, str]:
    """What ``accelerate launch FLAGS`` adds to its processes' environment."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    arguments = launch_command_parser().parse_args([*flags, "--mixed_precision", "no", "--dynamo_backend", "no", "script.py"])
    arguments.num_processes, arguments.num_machines, arguments.main_process_port = 2, 1, 29501
    arguments.fsdp_version = int(arguments.fsdp_version)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        return prepare_deepspeed_cmd_env(arguments)[1]
    return prepare_multi_gpu_env(arguments)


@pytest.mark.parametrize(
    ("flags", "form"),
    [
        (["--use_fsdp"], "ACCELERATE_USE_FSDP"),
        (["--use_deepspeed"], "ACCELERATE_USE_DEEPSPEED"),
        (["--use_megatron_lm"], "ACCELERATE_USE_MEGATRON_LM"),
        (["--use_parallelism_config", "--parallelism_config_tp_size", "2"], "PARALLELISM_CONFIG_TP_SIZE"),
    ],
)
def test_other_forms_of_parallel_training_are_refused_before_a_model_is_built(flags, form, tmp_path, monkeypatch) -> None:
    for name, value in environment_of(*flags).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("coder_plugin.training.prepare.make_model", lambda *_, **__: pytest.fail("a model is built"))
    with pytest.raises(CoderError) as refused:
        Trainer(model="coder-tiny", loss="dcl", train="scenes", config=options(tmp_path))
    assert f"asks for {form}. This trainer has DDP only" in str(refused.value)
    assert "\n" not in str(refused.value) and "coder_plugin.integrations.open_clip --fsdp" in str(refused.value)
    assert not distributed.dist.is_initialized() and not list(tmp_path.iterdir())


def test_a_parallelism_that_a_script_passed_to_accelerate_is_refused() -> None:
    check_parallelism({}, SimpleNamespace(tp_size=1, cp_size=1, sp_size=1, dp_shard_size=1, dp_replicate_size=4))
    with pytest.raises(CoderError, match="asks for ParallelismConfig.cp_size"):
        check_parallelism({}, SimpleNamespace(tp_size=1, cp_size=2, sp_size=1, dp_shard_size=1))


#: Of the third of four tasks on two machines.
TASK = {
    "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07,12]", "SLURM_JOB_NODELIST": "gpu[03-12]",
}  # fmt: skip


def ranks(**changes: str | None) -> dict[str, str]:
    environment = {name: value for name, value in {**TASK, **changes}.items() if value is not None}
    ranks_from_slurm(environment)
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_")}


def test_ranks_come_from_slurm() -> None:
    assert ranks() == {
        "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(10_000 + 1234567 % 20_000),
    }  # fmt: skip
    assert ranks(SLURM_STEP_NODELIST=None)["MASTER_ADDR"] == "gpu03"
    assert ranks(SLURM_STEP_ID="1")["MASTER_PORT"] != ranks()["MASTER_PORT"]
    named = ranks(MASTER_ADDR="first", MASTER_PORT="29500", SLURM_LOCALID="1")
    assert (named["MASTER_ADDR"], named["MASTER_PORT"], named["LOCAL_RANK"]) == ("first", "29500", "1")


def test_without_several_tasks_of_srun_nothing_is_set() -> None:
    for changes in (
        {"SLURM_PROCID": None},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": None},  # a batch script: its variables name the job's tasks
        {"SLURM_STEP_NUM_TASKS": None, "MASTER_ADDR": "first"},  # the same script, as docs/multi_node.md prints it
    ):
        assert not {"RANK", "WORLD_SIZE"} & ranks(**changes).keys()


def as_slurm() -> None:
    """Give this forked rank SLURM's variables for those that torchrun would set."""
    theirs = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    os.environ.update({slurm: os.environ.pop(name) for name, slurm in theirs.items()})
    del os.environ["LOCAL_WORLD_SIZE"]


@forks
def test_a_run_starts_from_slurms_variables(tmp_path, tiny_model) -> None:
    def train(folder: Path) -> None:
        as_slurm()
        config = options(folder, model=tiny_model, train_num_samples=16)
        trainer = Trainer(model=tiny_model, loss="dcl", train="scenes", config=config)
        trainer.run()
        print("rank", distributed.rank(), "of", distributed.world_size(), "after step", trainer.step)

    endings = forked.run(train, tmp_path)
    assert [ending.status for ending in endings] == [0, 0], endings
    for rank, ending in enumerate(endings):
        assert f"rank {rank} of 2 after step 2" in ending.output


@forks
def test_a_model_opened_under_slurm_joins_the_other_ranks_and_leaves_them_at_exit(tmp_path) -> None:
    from coder_plugin.pretrained.device import default_device

    def join(folder: Path) -> None:
        as_slurm()
        at_exit = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("atexit.register", at_exit.append)
            default_device()
            default_device()
        print(distributed.all_sum(torch.tensor([1.0 + distributed.rank()])).item())
        (leave,) = at_exit
        leave()
        print("left" if not distributed.dist.is_initialized() else "stays")

    endings = forked.run(join, tmp_path)
    assert ["3.0" in ending.output and "left" in ending.output for ending in endings] == [True, True], endings


@forks
def test_machines_that_share_no_folder_are_refused_before_the_first_step(tmp_path, tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(disk, "SEEN_WITHIN", 0.5)

    def train(folder: Path) -> None:
        logs = folder / f"machine{os.environ['RANK']}"
        config = options(logs, model=tiny_model, train_num_samples=16)
        trainer = Trainer(model=tiny_model, loss="dcl", train="scenes", config=config)
        trainer.training_step = lambda *_: print("a step was taken")
        trainer.run()

    endings = forked.run(train, tmp_path)
    assert [ending.status for ending in endings] == [2, 2], endings
    assert "coder-plugin: error: rank 1 on " in endings[1].output and "--logs must be on a file system" in endings[0].output
    assert not any("a step was taken" in ending.output for ending in endings)
    assert not list(tmp_path.rglob(".shared-*"))


def two_models() -> str:
    with pytest.raises(CoderError) as told:
        make_accelerator(TrainConfig())
    return str(told.value)


def test_a_process_group_that_accelerate_does_not_see_is_refused():
    """Without a launcher's variables each rank would train a model of its own."""
    for told in gloo.run(two_models):
        assert "a process group of 2 processes, and accelerate sees 1" in told and "torchrun" in told
