"""CxC's ratings in both layouts, and its recalls by one query at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from coder_plugin.data.source import one_caption
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import coco, cxc
from coder_plugin.evaluation.multi_positive import Scores

IMAGES = [100 + n for n in range(12)]
CAPTIONS = {image: [10 * image + n for n in range(2)] for image in IMAGES}
IMAGE_OF = {caption: image for image, own in CAPTIONS.items() for caption in own}
#: Ratings beside those of an image's own captions: what is at or above the threshold, and what is just below.
SITS = [(1000, 101, 3.0), (1001, 101, 2.99), (1020, 105, 4.2), (1030, 103, 2.5)]  # the last one is its own image
SIS = [(100, 101, 2.5), (103, 102, 2.49), (104, 102, 5.0), (102, 104, 0.0)]
STS = [(1000, 1001, 0.0), (1010, 1050, 3.0), (1110, 1000, 2.99)]


def picture(image: int) -> str:
    return f"COCO_val2014_{image:012d}.jpg"


def sentence(caption: int) -> str:
    return f"COCO_val2014:sentid:{caption}"


def write_csv(folder: Path) -> Path:
    folder.mkdir()
    own = [(caption, image, 5.0 if caption != 1030 else 2.5) for caption, image in IMAGE_OF.items()]
    rows = [f"{sentence(c)},{picture(i)},{r},c2i_{'original' if IMAGE_OF[c] == i else 'intrasim'}" for c, i, r in {*own, *SITS}]
    (folder / "sits_test.csv").write_text("\n".join(["caption,image,agg_score,sampling_method", *rows]))
    rows = [f"{picture(a)},{picture(b)},{r},i2i_csim" for a, b, r in SIS]
    (folder / "sis_test.csv").write_text("\n".join(["image1,image2,agg_score,sampling_method", *rows]))
    rows = [f"{sentence(a)},{sentence(b)},{r},c2c_isim" for a, b, r in STS]
    (folder / "sts_test.csv").write_text("\n".join(["caption1,caption2,agg_score,sampling_method", *rows]))
    return folder


@pytest.fixture
def ratings(tmp_path: Path) -> cxc.CxC:
    return cxc.read_cxc(write_csv(tmp_path / "csv"))


def test_who_matches(ratings: cxc.CxC) -> None:
    assert ratings.benchmark.image_of == IMAGE_OF
    i2t, t2i, i2i, t2t = (ratings.truths[way] for way in ("i2t", "t2i", "i2i", "t2t"))
    assert i2t[100] == {1000, 1001} and i2t[101] == {1010, 1011, 1000} and i2t[105] == {1050, 1051, 1020}
    assert t2i[1000] == {100, 101} and t2i[1001] == {100} and 1030 not in t2i and i2t[103] == {1031}
    assert i2i == {100: {101}, 101: {100}, 104: {102}, 102: {104}}
    assert t2t[1000] == {1001} and t2t[1010] == {1011, 1050} and t2t[1050] == {1051, 1010} and len(t2t) == len(IMAGE_OF)


def test_recalls_by_one_query_at_a_time(ratings: cxc.CxC) -> None:
    rng = torch.Generator().manual_seed(3)
    captions = list(IMAGE_OF)[::-1]
    numbers = coco.Numbers(IMAGES, captions, 1 + torch.arange(len(captions)))
    images, texts = torch.randn(len(IMAGES), 3, generator=rng), torch.randn(1 + len(captions), 3, generator=rng)
    texts[0] = 100 * images[0]  # the data's caption that is not the benchmark's
    got = cxc.cxc_recalls(Scores(images, texts), numbers, ratings)
    ids, vectors = {"i": IMAGES, "t": captions}, {"i": images, "t": texts[1:]}
    for way, truth in ratings.truths.items():
        a, b = way[0], way[-1]
        places = []
        for query, vector in zip(ids[a], vectors[a], strict=True):
            order = sorted(ids[b], key=lambda c: -float(vector @ vectors[b][ids[b].index(c)]))  # noqa: B023
            order = [candidate for candidate in order if not (a == b and candidate == query)]
            if truth.get(query):
                places.append(min(order.index(right) for right in truth[query]))
        expected = {f"r{k}": 100 * sum(place < k for place in places) / len(places) for k in (1, 5, 10)}
        assert got[way] == pytest.approx({**expected, "queries": len(places)})
    assert [got[way]["queries"] for way in ("i2t", "t2i", "i2i", "t2t")] == [12, 23, 4, 24]
    line = cxc.format_cxc({"a": got}).splitlines()[1]
    assert f"{got['t2t']['r10']:.1f}" in line and len(line.split()) == 13


def test_files_that_are_not_its(ratings: cxc.CxC, tmp_path: Path) -> None:
    with pytest.raises(CoderError, match="has no sits_test.csv, sis_test.csv, sts_test.csv: CxC's files are"):
        cxc.read_cxc(tmp_path)
    broken = tmp_path / "csv"
    (broken / "sis_test.csv").write_text("image1,image2,agg_score,sampling_method\nCOCO_1.jpg,COCO_2.jpg,high,i2i_csim\n")
    with pytest.raises(CoderError, match="sis_test.csv: line 2 is not"):
        cxc.read_cxc(broken)
    (broken / "sis_test.csv").write_text("image1,image2,agg_score,sampling_method\nnobody,COCO_2.jpg,1,i2i_csim\n")
    with pytest.raises(CoderError, match="'nobody' ends in no number"):
        cxc.read_cxc(broken)
    (broken / "sis_test.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(CoderError, match="not CxC's ratings"):
        cxc.read_cxc(broken)


def test_the_numbers_in_cocos_own_file(ratings: cxc.CxC, tmp_path: Path) -> None:
    from coder_plugin.data import open_source

    annotations = [{"id": caption, "image_id": image, "caption": str(caption)} for caption, image in IMAGE_OF.items()]
    images = [{"id": image, "file_name": picture(image)} for image in IMAGES[::-1]]
    path = tmp_path / "captions_val2014.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    source = open_source(str(path), pictures=False)
    found = coco.coco_numbers((item for _, item in source.items()), ratings.benchmark)
    assert list(found.values()) == [(image, CAPTIONS[image]) for image in IMAGES[::-1]]
    assert one_caption(source.item(0), 0).caption_names == ()  # a sample has one caption, without its name


def test_other_data_are_refused(ratings: cxc.CxC) -> None:
    from coder_plugin.data.scenes import open_scenes

    with pytest.raises(CoderError, match="CxC needs COCO's Karpathy test split, and none of the 3 images"):
        coco.coco_numbers(open_scenes("val", count=3), ratings.benchmark)
