"""Re-ranking without a trained head, from the command line: ``--reranker maxsim``, and one that another package brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coder_plugin import functional, register, registry
from coder_plugin.cli import main
from coder_plugin.data import open_source
from coder_plugin.data.scenes import open_scenes
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import rerank
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.capabilities import Reranks
from coder_plugin.heads.maxsim import MaxSim
from coder_plugin.pretrained.open import open_pretrained
from coder_plugin.pretrained.saved_model import check_saved_reranker
from coder_plugin.search.embed import embedded
from coder_plugin.search.index import Index
from coder_plugin.search.parquet import read_npy
from coder_plugin.search.searcher import Searcher, open_searcher
from tests.search.made import write_model, write_pictures

COUNT = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), COUNT)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("export"), "clip", seed=1)


def build(export: Path, data: Path, folder: Path, *flags: str) -> int:
    command = ["index", str(export), "--data", str(data), "--workers", "0", "--batch-size", "16", "--output", str(folder)]
    return main([*command, *flags])


@pytest.fixture(scope="module")
def index(data: Path, export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "index"
    assert build(export, data, folder, "--reranker", "maxsim") == 0
    return folder


def scores_of(export: Path, data: Path, **options: str) -> tuple[Tensor, Tensor]:
    """Inner products and MaxSim [texts, images] of the data, computed from the model's tokens."""
    pretrained = open_pretrained(export, reranker="maxsim")
    encoded = pretrained.encoder(workers=0)(open_source(str(data)))
    image, text = encoded.items.images, encoded.items.texts
    tokens = [image["tokens"].float(), image["mask"], text["tokens"].float(), text["mask"]]
    return encoded.texts @ encoded.images.T, functional.maxsim(*tokens, **options).T


def test_a_search_is_in_maxsims_order(index: Path, export: Path, data: Path, capsys) -> None:
    products, fine = scores_of(export, data)
    searcher = open_searcher(index)
    assert isinstance(searcher.head, MaxSim) and searcher.shortlist == 32
    caption = open_scenes("val")[0].captions[0]
    first = products[0].topk(10).indices
    expected = first[fine[0][first].argsort(descending=True)]
    hits = searcher.search(searcher.text([caption])[0], 12, rerank=10)
    assert [hit.row for hit in hits[:10]] == expected.tolist() != first.tolist()
    assert [hit.fused for hit in hits[:10]] == pytest.approx(fine[0][expected].tolist(), abs=1e-3)
    assert [hit.score for hit in hits[:10]] == pytest.approx(products[0][expected].tolist(), abs=1e-5)
    assert hits[10].fused is None

    texts = searcher.search(searcher.key(str(data.parent / "003.png")), 2 * COUNT, rerank="all")  # the image's stored tokens
    assert [hit.row for hit in texts][:5] == fine[:, 3].argsort(descending=True)[:5].tolist()

    capsys.readouterr()
    other = ["--text", caption, "-k", "3", "--rerank", "all", "--json"]
    assert main(["search", str(index), *other, "--reranker", "maxsim(direction=both)"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    _, both = scores_of(export, data, direction="both")
    assert [row["fused"] for row in found["results"]] == pytest.approx(both[0].topk(3).values.tolist(), abs=1e-3)


def test_eval_re_ranks(export: Path, data: Path, tmp_path: Path) -> None:
    command = ["eval", str(export), "--val-data", str(data), "--workers", "0", "--json"]
    assert main([*command, str(tmp_path / "fine.json"), "--reranker", "maxsim", "--rerank", "8"]) == 0
    assert main([*command, str(tmp_path / "plain.json")]) == 0
    fine, plain = (json.loads((tmp_path / name).read_text()) for name in ("fine.json", "plain.json"))
    pretrained = open_pretrained(export, reranker="maxsim")
    encoded = pretrained.encoder(workers=0)(open_source(str(data)))
    scorer = encoded.items.head.scorer(encoded.items.images, encoded.items.texts)
    want = rerank(encoded.images, encoded.texts, encoded.image_of_text, scorer, k=8)
    assert fine["rerank"] == 8 and fine["rsum"] == pytest.approx(want["rsum"])
    assert fine["shortlist"]["rsum"] == pytest.approx(plain["rsum"]) and "shortlist" not in plain


class Pooled(Reranks):
    """A third re-ranker: products of mean tokens."""

    requires = ("image_contexts", "text_contexts", "text_context_mask")

    def __init__(self, backbone: BackboneInfo, *, sign: float = 1.0) -> None:
        super().__init__()
        self.sign = sign

    def image_item(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"mean": features["image_contexts"].mean(1)}

    def text_item(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["text_context_mask"][..., None]
        return {"mean": (features["text_contexts"] * mask).sum(1) / mask.sum(1)}

    def scorer(self, images: dict[str, Tensor], texts: dict[str, Tensor]) -> PooledScorer:
        return PooledScorer(self.sign * images["mean"].float(), texts["mean"].float())


class PooledScorer:
    def __init__(self, images: Tensor, texts: Tensor) -> None:
        self.images, self.texts = images, texts

    def __call__(self, image_index: Tensor, text_index: Tensor) -> Tensor:
        return torch.einsum("gad,gbd->gab", self.images[image_index], self.texts[text_index])

    def all_pairs(self) -> Tensor:
        return self.images @ self.texts.T


def test_one_from_another_package(export: Path, data: Path, index: Path, tmp_path: Path, capsys) -> None:
    register("rerankers", "pooled", Pooled)
    try:
        assert build(export, data, tmp_path / "index", "--reranker", "pooled") == 0
        assert Index(tmp_path / "index").note["model"]["reranker"] == "pooled"
        caption = open_scenes("val")[0].captions[0]
        found = {}
        for name in ("pooled", "pooled(sign=-1)"):
            searcher = open_searcher(tmp_path / "index", reranker=name)
            found[name] = [hit.row for hit in searcher.search(searcher.text([caption])[0], COUNT, rerank="all")]
        assert found["pooled"] == found["pooled(sign=-1)"][::-1]
        encoded = open_pretrained(export, reranker="pooled").encoder(workers=0)(open_source(str(data)))
        want = encoded.items.head.scorer(encoded.items.images, encoded.items.texts).all_pairs()[:, 0]
        assert found["pooled"] == want.argsort(descending=True).tolist()
        assert main(["eval", str(export), "--val-data", str(data), "--workers", "0", "--reranker", "pooled"]) == 0
        assert "re-ranked 32" in capsys.readouterr().out
        for command in (["search", str(tmp_path / "index"), "--text", "x"],):
            assert main(command) == 2
            error = capsys.readouterr().err
            assert "names the re-ranker 'pooled' of another package: if you trust it" in error and "--reranker pooled" in error
        with pytest.raises(CoderError, match="keeps tokens for 'maxsim', not for 'pooled': take --reranker maxsim"):
            open_searcher(index, reranker="pooled")
        with pytest.raises(CoderError, match="keeps tokens for 'maxsim', not for its model's own head: take --reranker maxsim"):
            Searcher(Index(index), open_pretrained(export))
    finally:
        registry.unregister("rerankers", "pooled")
    with pytest.raises(CoderError, match="--reranker 'pooled' is unknown"):
        open_searcher(tmp_path / "index")


def test_an_index_without_tokens_cannot_re_rank(export: Path, data: Path, tmp_path: Path, capsys) -> None:
    assert build(export, data, tmp_path / "index", "--reranker", "maxsim", "--no-rerank-items") == 0
    assert not list((tmp_path / "index").glob("*tokens*"))
    searcher = open_searcher(tmp_path / "index")
    assert searcher.head is None and searcher.search(searcher.text(["two"])[0], 2)[0].fused is None
    capsys.readouterr()
    assert main(["search", str(tmp_path / "index"), "--text", "x", "--reranker", "maxsim"]) == 2
    assert "keeps no tokens to re-rank by: build it with coder-plugin index --reranker maxsim" in capsys.readouterr().err


def test_a_re_ranker_that_a_file_names_must_be_ours() -> None:
    check_saved_reranker("maxsim(direction=both)", "x.json")
    with pytest.raises(CoderError, match="is unknown; known: maxsim"):
        check_saved_reranker("os.system", "x.json")


def test_embeddings_keep_the_tokens(export: Path, data: Path, tmp_path: Path, capsys) -> None:
    flags = ["--data", str(data), "--workers", "0", "--batch-size", "16"]
    command = ["embed", str(export), *flags, "--output", str(tmp_path / "e")]
    assert main([*command, "--tokens"]) == 2
    assert "has no head that re-ranks: add --reranker maxsim, or leave out --tokens" in capsys.readouterr().err
    assert main([*command, "--reranker", "maxsim", "--what", "captions"]) == 2
    assert main([*command, "--reranker", "maxsim"]) == 0
    table = embedded(tmp_path / "e")
    encoded = open_pretrained(export, reranker="maxsim").encoder(workers=0)(open_source(str(data)))
    cells = [read_npy(cell) for _, batch in table.batches(["image_tokens_tokens"]) for cell in batch.column(0).to_pylist()]
    kept = torch.stack([torch.from_numpy(cell) for cell in cells])
    assert kept.dtype == torch.float16 and table.model["reranker"] == "maxsim"
    torch.testing.assert_close(kept, encoded.items.images["tokens"], atol=1e-3, rtol=1e-3)
    assert main([*command, "--reranker", "maxsim(direction=both)"]) == 2
    assert "re-ranker was maxsim, is maxsim(direction=both)" in capsys.readouterr().err
