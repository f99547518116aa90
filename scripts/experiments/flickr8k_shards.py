#!/usr/bin/env python3
"""Write Flickr8k as the shards that flickr8k_prepare.py takes.

    python scripts/experiments/flickr8k_shards.py dataset_flickr8k.json Flicker8k_Dataset/ SHARDS

reads Karpathy's file of splits and captions and the folder of pictures, and writes SHARDS/train-000000.tar to train-000005.tar,
val-000000.tar and test-000000.tar: 1,000 pictures each, those of a split in the order of their file names. Pictures are resized
to 224 × 224 pixels, as those of docs/evidence. A split that the file does not have is left out.

Hodosh, Young and Hockenmaier (2013), who collected Flickr8k, give it out for research.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import webdataset
from PIL import Image

#: Pictures of a shard.
SIZE = 1000


def write_shards(dataset: Path, pictures: Path, output: Path, side: int = 224) -> dict[str, int]:
    """Write the shards; returns the number of pictures of each split."""
    images: list[dict[str, Any]] = json.loads(dataset.read_text(encoding="utf-8"))["images"]
    if missing := [image["filename"] for image in images if not (pictures / image["filename"]).is_file()]:
        raise SystemExit(f"{len(missing)} of {len(images)} pictures are not in {pictures}, the first is {missing[0]}")
    output.mkdir(parents=True, exist_ok=True)
    counts, number = {}, 0
    for split in ("train", "val", "test"):
        own = sorted((image for image in images if image["split"] == split), key=lambda image: image["filename"])
        for first in range(0, len(own), SIZE):
            with webdataset.TarWriter(str(output / f"{split}-{first // SIZE:06d}.tar")) as shard:
                for image in own[first : first + SIZE]:
                    captions = [" ".join(sentence["raw"].split()) for sentence in image["sentences"]]
                    about = {"image_id": number, "filename": image["filename"], "split": split, "captions": captions}
                    picture = resized(pictures / image["filename"], side)
                    shard.write({"__key__": f"{number:09d}", "jpg": picture, "txt": captions[0], "json": about})
                    number += 1
        if own:
            counts[split] = len(own)
    return counts


def resized(path: Path, side: int) -> bytes:
    """A picture as a JPEG of ``side`` × ``side`` pixels; the aspect ratio changes."""
    content = io.BytesIO()
    with Image.open(path) as picture:
        picture.convert("RGB").resize((side, side), Image.Resampling.BICUBIC).save(content, "JPEG", quality=80)
    return content.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="dataset_flickr8k.json")
    parser.add_argument("pictures", type=Path, help="the folder of the pictures")
    parser.add_argument("output", type=Path, help="the folder of the shards")
    options = parser.parse_args()
    counts = write_shards(options.dataset, options.pictures, options.output)
    print(", ".join(f"{split}: {count:,} images" for split, count in counts.items()))


if __name__ == "__main__":
    main()
