"""Examples, maps and pictures of encoded data, without a model."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
import torch
from PIL import Image

from coder_plugin import html as page
from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.source import ItemSource
from coder_plugin.errors import CoderError
from coder_plugin.evaluation import recall_from_embeddings
from coder_plugin.pretrained.encode import Encoded, Items
from coder_plugin.report import examples, sections
from coder_plugin.report.examples import best_and_worst, items_of, query_blocks


def ranked(encoded: Encoded) -> dict[str, Any]:
    return recall_from_embeddings(encoded.images, encoded.texts, encoded.image_of_text)


def test_images_without_pictures_are_called_by_name() -> None:
    regions = [Item(f"image-{n}", (f"caption {n}",), lambda: Regions(torch.zeros(2, 3).numpy())) for n in range(3)]
    ids = torch.tensor([item.image_id for item in regions])
    captions = [item.captions[0] for item in regions]
    encoded = Encoded(torch.eye(3), torch.eye(3), torch.arange(3), ids, captions, index=torch.arange(3))
    options: dict[str, Any] = {"result": ranked(encoded), "count": 1, "depth": None}
    shown = query_blocks(encoded, ItemSource(regions), None, **options)
    assert shown[1]["query"]["hits"][0]["image"] == {"uri": None, "key": "image-0", "alt": "caption 0"}
    red = [Item(item.key, item.captions, lambda: Image.new("RGB", (9, 9), "red")) for item in regions]
    shown = query_blocks(encoded, ItemSource(regions), ItemSource(red), **options)
    assert shown[1]["query"]["hits"][0]["image"]["uri"].startswith("data:image/jpeg")


def test_images_of_one_key_keep_their_own_pictures() -> None:
    """As they have in shards with equal names; one cannot be read, so that it is not among the vectors."""

    def broken() -> Any:
        raise OSError("gone")

    items = [
        Item("a", ("gone",), broken),
        *(Item("a", (colour, "b"), lambda colour=colour: Image.new("RGB", (9, 9), colour)) for colour in ("red", "blue")),
        Item("b", ("green",), lambda: Image.new("RGB", (9, 9), "lime")),
    ]
    captions = [caption for item in items[1:] for caption in item.captions]
    ids = torch.tensor([item.image_id for item in items[1:]])
    owner = torch.tensor([0, 0, 1, 1, 2])
    encoded = Encoded(torch.eye(3), torch.eye(3)[owner], owner, ids, captions, index=torch.arange(1, 4))
    source = ItemSource(items)
    assert {row: item.captions[0] for row, item in items_of(source, encoded, {2, 1}).items()} == {1: "blue", 2: "green"}
    blocks = query_blocks(encoded, source, None, ranked(encoded), count=3, depth=None)
    texts = [block["query"] for block in blocks if block.get("query", {}).get("caption")]
    assert len(texts) == 3
    for query in texts:
        [match] = [hit["image"] for hit in query["hits"] if hit["right"]]
        assert match["alt"] == query["caption"]
        content = base64.b64decode(match["uri"].split(",")[1])
        bands = Image.open(io.BytesIO(content)).resize((1, 1)).getpixel((0, 0))
        assert bands.index(max(bands)) == ("red", "green", "blue").index(query["caption"])  # type: ignore[union-attr, arg-type]


class Reversed:
    """Scores a pair by minus its product."""

    def scorer(self, images: dict[str, torch.Tensor], texts: dict[str, torch.Tensor]) -> Any:
        return lambda image, text: -torch.einsum("gad,gbd->gab", images["x"][image], texts["x"][text])


@pytest.mark.parametrize("depth", [None, 4])
def test_a_fusion_score_orders_what_recall_says_it_orders(depth: int | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(examples, "_PAIRS", 3)
    monkeypatch.setattr(examples, "_SHOWN", 20)
    generator = torch.Generator().manual_seed(0)
    images, texts = torch.randn(6, 4, generator=generator), torch.randn(12, 4, generator=generator)
    owner = torch.arange(12) // 2
    captions = [f"c{number}" for number in range(12)]
    encoded = Encoded(images, texts, owner, torch.arange(6), captions, Items(Reversed(), {"x": images}, {"x": texts}))
    scores = images @ texts.T
    for way in ("i2t", "t2i"):
        find = examples.finder(encoded, way, depth)  # type: ignore[arg-type]
        for query in range(6 if way == "i2t" else 12):
            row = scores[query] if way == "i2t" else scores[:, query]
            order = row.argsort(descending=True)
            shortlist, behind = order[:depth], order[len(order[:depth]) :]
            expected = torch.cat([shortlist[row[shortlist].argsort()], behind])
            hits = find(query).hits
            assert [hit.index for hit in hits] == expected.tolist()
            assert [hit.behind for hit in hits] == [number >= len(shortlist) for number in range(len(row))]
            values = torch.cat([-row[expected[: len(shortlist)]], row[behind]])
            assert [hit.score for hit in hits] == pytest.approx(values.tolist(), abs=1e-6)


def test_ties_count_against_a_query_and_an_image_is_asked_once() -> None:
    vectors = torch.ones(4, 2)
    owner = torch.tensor([0, 0, 1, 2, 3])
    encoded = Encoded(vectors, torch.ones(5, 2), owner, torch.arange(4), [f"c{n}" for n in range(5)])
    ranks = recall_from_embeddings(encoded.images, encoded.texts, owner)
    best, worst = best_and_worst(encoded, "t2i", ranks["t2i_ranks"], count=2)
    assert [each.query for each in best] == [0, 2] and [each.query for each in worst] == [3, 4]
    assert all(each.rank == 3 and not any(hit.right for hit in each.hits[:3]) for each in (*best, *worst))
    best, worst = best_and_worst(encoded, "i2t", ranks["i2t_ranks"], count=9)
    assert len(best) == 4 and worst == [] and best[0].rank == 3


def test_maps_pair_images_with_their_first_captions(monkeypatch: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    images, texts = torch.randn(30, 2, 8, generator=generator), torch.randn(60, 8, generator=generator)
    encoded = Encoded(images, texts, torch.arange(60) // 2, torch.arange(30), [f"c{n}" for n in range(60)])
    placed: list[Any] = []
    monkeypatch.setattr(sections, "_PAIRS", 12)
    monkeypatch.setattr(sections, "tsne", lambda vectors: placed.append(vectors) or vectors[:, :2])
    [block] = sections.vector_map(sections.Evaluated("", encoded, None, None, {}))
    assert "12 images" in block["figures"][0].note and "<svg" in block["figures"][0].chart
    chosen = [0, 3, 5, 8, 11, 13, 16, 18, 21, 24, 26, 29]
    torch.testing.assert_close(torch.from_numpy(placed[0][12:]), texts[0::2][chosen])
    best = [max(range(2), key=lambda view: float(images[n, view] @ texts[2 * n])) for n in chosen]
    torch.testing.assert_close(torch.from_numpy(placed[0][:12]), images[chosen, best])
    one = encoded._replace(images=images[:1], texts=texts[:1], image_of_text=torch.tensor([0]))
    with pytest.raises(CoderError, match="two images or more"):
        sections.vector_map(sections.Evaluated("", one, None, None, {}))  # type: ignore[arg-type]


def test_small_pictures_are_small() -> None:
    uri = page.data_uri(Image.effect_noise((900, 300), 80), 160)
    assert uri.startswith("data:image/jpeg;base64,") and len(uri) < 20_000
    assert page.render("base.html").startswith("<!DOCTYPE html>")
