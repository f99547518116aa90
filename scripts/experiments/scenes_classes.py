#!/usr/bin/env python3
"""Write a classification set from the built-in scenes, for ``coder-plugin eval --zeroshot``.

    python scripts/experiments/scenes_classes.py FOLDER --by shape --per-class 50

writes FOLDER/CLASS/NUMBER.png. Each picture shows one object. None of them is among the training scenes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import count
from pathlib import Path

from coder_plugin.data.scenes import COLOURS, SHAPES, draw, make_scene


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--by", choices=("shape", "colour"), default="shape", help="what the classes are [shape]")
    parser.add_argument("--per-class", type=int, default=50, help="pictures of each class [50]")
    parser.add_argument("--size", type=int, default=64, help="width and height in pixels [64]")
    args = parser.parse_args()
    target = dict.fromkeys(SHAPES if args.by == "shape" else COLOURS, args.per_class)
    written: Counter[str] = Counter()
    for number in count():
        scene = make_scene("val", number)
        label = getattr(scene.things[0], args.by)
        if len(scene.things) == 1 and written[label] < target[label]:
            path = args.folder / label / f"{number:06d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(scene, args.size).save(path)
            written[label] += 1
        if written == target:
            break


if __name__ == "__main__":
    main()
