"""What the command measures of encoded data: of one model and several, of a fusion score by pairs and by shortlists."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coder_plugin.data.item import Item
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import coco, cxc
from coder_plugin.evaluation.benchmarks import (
    Benchmarks,
    DataTruths,
    format_benchmarks,
    load_benchmarks,
    match_data,
    measure_benchmarks,
)
from coder_plugin.evaluation.breakdowns import breakdown, groups_of
from coder_plugin.evaluation.evaluate import ensemble, measure
from coder_plugin.evaluation.multi_positive import Scores
from coder_plugin.pretrained.encode import Encoded
from tests.evaluation.test_cxc import CAPTIONS, IMAGES, write_csv

#: Each image has a caption more than the benchmark knows.
ITEMS = [
    Item(str(image), ("two dogs", "a red ball", "dogs"), lambda: None, caption_names=(*map(str, own), str(9000 + image)))
    for image, own in CAPTIONS.items()
]
VECTORS = dict.fromkeys(("i2t", "t2i", "i2i", "t2t"), "vectors")
OWNER = torch.arange(len(IMAGES)).repeat_interleave(3)


@pytest.fixture
def benchmarks(tmp_path: Path) -> Benchmarks:
    return load_benchmarks(by=["words", "place"], cxc_folder=str(write_csv(tmp_path / "cxc")))


@pytest.fixture
def truths(benchmarks: Benchmarks) -> DataTruths:
    return match_data(benchmarks, ItemSource(ITEMS))


def encoded(seed: int, head: Any = None) -> Encoded:
    rng = torch.Generator().manual_seed(seed)
    images, texts = torch.randn(12, 5, generator=rng), torch.randn(36, 5, generator=rng)
    ids = torch.tensor([item.image_id for item in ITEMS])
    captions = [caption for item in ITEMS for caption in item.captions]
    items = None if head is None else SimpleNamespace(head=head, images={}, texts={})
    return Encoded(images, texts, OWNER, ids, captions, items)


class Fusion:
    """Scores pairs by a matrix."""

    training = False

    def __init__(self) -> None:
        self.matrix = torch.randn(12, 36, generator=torch.Generator().manual_seed(9))

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...

    def scorer(self, images: Any, texts: Any) -> Any:
        return self

    def __call__(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        return self.matrix[images[:, :, None], texts[:, None]]

    def all_pairs(self) -> torch.Tensor:
        return self.matrix


def expected(benchmarks: Benchmarks, scores: Scores) -> dict[str, Any]:
    texts = torch.arange(36)[torch.arange(36) % 3 < 2]
    numbers = coco.Numbers(IMAGES, [caption for own in CAPTIONS.values() for caption in own], texts)
    return cxc.cxc_recalls(scores, numbers, benchmarks.cxc)  # type: ignore[arg-type]


def test_one_model_and_several(benchmarks: Benchmarks, truths: DataTruths) -> None:
    one, other = encoded(0), encoded(1)
    got = measure_benchmarks(benchmarks, truths, one, measure(one, 0, None))
    assert got["cxc"] == {**expected(benchmarks, Scores(one.images, one.texts)), "ranked_by": VECTORS}
    both = ensemble([one, other])
    measured = measure(both, 0, None)
    got = measure_benchmarks(benchmarks, truths, both, measured)
    scores = Scores([one.images, other.images], [one.texts, other.texts])
    assert got["cxc"] == {**expected(benchmarks, scores), "ranked_by": VECTORS}
    groups = groups_of("place", both.captions, OWNER)
    assert got["by"]["place"] == breakdown(groups, measured["t2i_ranks"], OWNER, scores.rows("i2t"))
    assert got["by"]["words"]["colour"]["t2i"]["count"] == 12
    text = format_benchmarks({"a": got})
    assert text.count("\n\n") == 2 and "CxC t2t R@10" in text and "caption 3" in text


def test_a_fusion_score_of_all_pairs_and_of_shortlists(benchmarks: Benchmarks, truths: DataTruths) -> None:
    fusion = Fusion()
    one = encoded(0, fusion)
    whole = measure(one, 0, None)
    got = measure_benchmarks(benchmarks, truths, one, whole)
    by_matrix = Scores(one.images, one.texts, fusion.matrix)
    ranked_by = {**VECTORS, "i2t": "fusion score", "t2i": "fusion score"}
    assert got["cxc"] == {**expected(benchmarks, by_matrix), "ranked_by": ranked_by}
    assert got["cxc"]["t2t"] == expected(benchmarks, Scores(one.images, one.texts))["t2t"]  # of one side: the vectors
    text = format_benchmarks({"a": {**got, "rerank": "all"}})
    assert "shortlist" not in text and text.endswith("t2t: by the vectors")
    groups = groups_of("place", one.captions, OWNER)
    assert got["by"]["place"] == breakdown(groups, whole["t2i_ranks"], OWNER, by_matrix.rows("i2t"))
    short = measure(one, 0, 4)
    assert "scores" not in short
    got = measure_benchmarks(benchmarks, truths, one, short)
    assert got["cxc"] == {**expected(benchmarks, Scores(one.images, one.texts)), "ranked_by": VECTORS}
    assert got["by"]["place"] == breakdown(groups, short["t2i_ranks"], OWNER)
    assert "a, shortlist" in (text := format_benchmarks({"a": {**got, "rerank": 4}})) and "by the vectors" not in text
    assert "shortlist" not in format_benchmarks({"a": got})


def test_images_that_were_left_out(benchmarks: Benchmarks, truths: DataTruths) -> None:
    one = encoded(0)
    less = one._replace(images=one.images[1:], texts=one.texts[3:], image_of_text=OWNER[3:] - 1, image_ids=one.image_ids[1:])
    less = less._replace(captions=one.captions[3:])
    with pytest.raises(CoderError, match="CxC needs all of its 12 images, and 1 of them could not be read"):
        measure_benchmarks(benchmarks, truths, less, measure(less, 0, None))
