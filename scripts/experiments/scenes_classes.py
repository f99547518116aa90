#!/usr/bin/env python3
"""Write a classification set of the built-in scenes, for ``coder-plugin eval --zeroshot``.

    python scripts/experiments/scenes_classes.py OUT --by shape --per-class 50

writes OUT/CLASS/NUMBER.png, pictures of one thing each, none of which is in the training scenes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import count
from pathlib import Path

from coder_plugin.data.scenes import COLOURS, SHAPES, draw, make_scene


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--by", choices=("shape", "colour"), default="shape")
    parser.add_argument("--per-class", type=int, default=50)
    parser.add_argument("--size", type=int, default=64, help="pixels")
    args = parser.parse_args()
    wanted = dict.fromkeys(SHAPES if args.by == "shape" else COLOURS, args.per_class)
    written: Counter[str] = Counter()
    for number in count():
        scene = make_scene("val", number)
        kind = getattr(scene.things[0], args.by)
        if len(scene.things) == 1 and written[kind] < wanted[kind]:
            path = args.out / kind / f"{number:06d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(scene, args.size).save(path)
            written[kind] += 1
        if written == wanted:
            break


if __name__ == "__main__":
    main()
