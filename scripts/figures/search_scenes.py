"""The README's figure: captions, and the five pictures that a model trained on the built-in scenes finds for each.

    coder-plugin train --name scenes
    python scripts/figures/search_scenes.py logs/scenes docs/figures/search_scenes.png

The texts are not chosen by their results: they are the first captions of the validation scenes that list things and fit into a
line. A frame marks the picture that the caption was written for. Pictures are drawn anew, larger than the model has read them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from coder_plugin.data.scenes import KINDS, draw, make_scene, open_scenes
from coder_plugin.pretrained.open import open_pretrained

COUNT = 500  # validation scenes
QUERIES, BEST, LONGEST = 3, 5, 72  # texts, pictures for each, characters of a text
SIDE, GAP, LINE = 132, 10, 26  # pixels


def figure(found: dict[int, list[int]], texts: dict[int, str]) -> Image.Image:
    """A row of pictures below each text."""
    row = LINE + SIDE + GAP
    page = Image.new("RGBA", (BEST * (SIDE + GAP) + GAP, len(found) * row + GAP))  # transparent: read on white and on black
    canvas, font = ImageDraw.Draw(page), ImageFont.load_default(size=17)
    for number, (wanted, indices) in enumerate(found.items()):
        top = GAP + number * row
        canvas.text((GAP, top), texts[wanted], fill=(115, 122, 130), font=font)
        for place, index in enumerate(indices):
            left = GAP + place * (SIDE + GAP)
            page.paste(draw(make_scene("val", index), SIDE), (left, top + LINE))
            box = (left - 4, top + LINE - 4, left + SIDE + 3, top + LINE + SIDE + 3)
            colour, width = ((20, 150, 70), 4) if index == wanted else ((150, 155, 160), 1)
            canvas.rectangle(box, outline=colour, width=width)
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run on the scenes")
    parser.add_argument("output", type=Path, help="the picture to write (.png)")
    arguments = parser.parse_args()

    model = open_pretrained(arguments.run)
    scenes = open_scenes("val", count=COUNT)
    listings = {index: scene.captions[KINDS.index("listing")] for index, scene in enumerate(scenes)}
    texts = {index: text for index, text in listings.items() if len(text) <= LONGEST}
    texts = dict(list(texts.items())[:QUERIES])
    with torch.no_grad():
        images = model.encode_images([scene.load() for scene in scenes])
        scores = model.encode_texts(list(texts.values())) @ images.T
    found = {index: row.topk(BEST).indices.tolist() for index, row in zip(texts, scores, strict=True)}
    for index, text in texts.items():
        rank = found[index].index(index) + 1 if index in found[index] else f"not among the first {BEST}"
        print(f"{text}: its picture is {rank}")
    figure(found, texts).quantize(96).save(arguments.output, optimize=True)
    print(f"{arguments.output}: {arguments.output.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
