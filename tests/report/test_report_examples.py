"""Examples, maps and pictures of encoded data, without a model."""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

import pytest
import torch
from PIL import Image

from coder_plugin import html as page
from coder_plugin.data.item import Item
from coder_plugin.data.regions.base import Regions
from coder_plugin.data.source import ItemSource
from coder_plugin.evaluation import recall_from_embeddings
from coder_plugin.pretrained.encode import Encoded, Items
from coder_plugin.report import examples, queries, sections
from coder_plugin.report.examples import best_and_worst
from coder_plugin.report.sections import place_vectors


def test_images_without_pictures_are_called_by_name() -> None:
    regions = [Item(f"image-{n}", (f"caption {n}",), lambda: Regions(torch.zeros(2, 3).numpy())) for n in range(3)]
    ids = torch.tensor([item.image_id for item in regions])
    vectors = torch.eye(3)
    encoded = Encoded(vectors, vectors, torch.arange(3), ids, [item.captions[0] for item in regions])
    found = {"i2t": best_and_worst(encoded, "i2t", torch.zeros(3, dtype=torch.int64), count=1)}
    shown = queries.describe_queries(encoded, ItemSource(regions), None, found)  # type: ignore[arg-type]
    assert shown[0]["queries"][0]["image"] == {"uri": None, "key": "image-0", "alt": "caption 0"}
    red = [Item(item.key, item.captions, lambda: Image.new("RGB", (9, 9), "red")) for item in regions]
    shown = queries.describe_queries(encoded, ItemSource(regions), ItemSource(red), found)  # type: ignore[arg-type]
    assert shown[0]["queries"][0]["image"]["uri"].startswith("data:image/jpeg")


def test_images_of_one_key_keep_their_own_pictures() -> None:
    """As they have in shards with equal names; one cannot be read, so that it is not among the vectors."""

    def broken() -> Any:
        raise OSError("gone")

    items = [
        Item("a", ("gone",), broken),
        *(
            Item("a", (colour, "b"), lambda colour=colour: Image.new("RGB", (9, 9), colour))
            for colour in ("red", "blue")
        ),
        Item("b", ("green",), lambda: Image.new("RGB", (9, 9), "lime")),
    ]
    captions = [caption for item in items[1:] for caption in item.captions]
    ids = torch.tensor([item.image_id for item in items[1:]])
    owner = torch.tensor([0, 0, 1, 1, 2])
    encoded = Encoded(torch.eye(3), torch.eye(3)[owner], owner, ids, captions)
    source = ItemSource(items)
    found = queries.items_of(source, encoded, {2, 1})
    assert {row: item.captions[0] for row, item in found.items()} == {1: "blue", 2: "green"}
    best = {"t2i": best_and_worst(encoded, "t2i", torch.zeros(5, dtype=torch.int64), count=3)}
    for query in queries.describe_queries(encoded, source, None, best)[0]["queries"]:  # type: ignore[arg-type]
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
    generator = torch.Generator().manual_seed(0)
    images, texts = torch.randn(6, 4, generator=generator), torch.randn(12, 4, generator=generator)
    owner = torch.arange(12) // 2
    captions = [f"c{number}" for number in range(12)]
    encoded = Encoded(images, texts, owner, torch.arange(6), captions, Items(Reversed(), {"x": images}, {"x": texts}))
    scores = images @ texts.T
    for way in ("i2t", "t2i"):
        rows = examples._rows(encoded, way, depth)  # type: ignore[arg-type]
        for query in range(6 if way == "i2t" else 12):
            row = scores[query] if way == "i2t" else scores[:, query]
            order = row.argsort(descending=True)
            shortlist, behind = order[:depth], order[len(order[:depth]) :]
            expected = torch.cat([shortlist[row[shortlist].argsort()], behind])
            candidates, values, ordered = rows(query)
            assert candidates.tolist() == expected.tolist()
            shown = examples.example(encoded, way, query, rows, first=20)  # type: ignore[arg-type]
            assert ordered == len(shortlist) and [hit.behind for hit in shown.hits] == [
                number >= len(shortlist) for number in range(len(row))
            ]
            torch.testing.assert_close(values, torch.cat([-row[expected[: len(shortlist)]], row[behind]]))


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
    placed = place_vectors(encoded, pairs=12)
    assert placed.image_index[0] == 0 and placed.image_index[-1] == 29 and len(placed.image_index) == 12
    assert placed.text_index == [2 * image for image in placed.image_index]
    flat = torch.zeros(20, 5)
    flat[:, 1], flat[:, 3] = torch.linspace(-2, 2, 20), torch.linspace(0, 1, 20) ** 2
    places = torch.from_numpy(sections._principal(flat))
    apart = torch.cdist(flat - flat.mean(0), flat - flat.mean(0))
    torch.testing.assert_close(torch.cdist(places, places), apart, atol=1e-4, rtol=1e-4)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert "principal components" in place_vectors(encoded, pairs=12).method


def test_small_pictures_are_small() -> None:
    uri = page.data_uri(Image.effect_noise((900, 300), 80), 160)
    assert uri.startswith("data:image/jpeg;base64,") and len(uri) < 20_000
    assert page.render("base.html").startswith("<!DOCTYPE html>")
