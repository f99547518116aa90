"""A table of hard negatives, made from an index of a training set; see docs/hard_negatives.md."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coder_plugin.files import atomic_write
from coder_plugin.progress import Progress
from coder_plugin.search.index import Index
from coder_plugin.search.miner import Mined, Miner, chunks
from coder_plugin.search.mining_options import COLUMNS, MiningOptions

#: Images of a block.
BLOCK = 256
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass
class Summary:
    """What was found.

    Args:
        images: of the index.
        without_captions: images that have none, and so no negatives.
        by_count: images by their number of negatives; those without captions are not among them.
        candidates: captions that were looked at, of all images together.
        dropped: of them, by the filter that left them out (:data:`FILTERS`).
        quantiles: by name, the values at :data:`QUANTILES` of the scores of images with their positives ("positive"), of the
            negatives' scores, of the differences of both, of the negatives' similarity, and of the similarity of two captions
            of an image ("same image"); nan where there is none.
    """

    images: int = 0
    without_captions: int = 0
    by_count: Counter[int] = field(default_factory=Counter)
    candidates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    quantiles: dict[str, list[float]] = field(default_factory=dict)

    @property
    def negatives(self) -> int:
        """Rows of the table."""
        return sum(count * images for count, images in self.by_count.items())


def mine_negatives(index: Index, path: str | Path, **options: Any) -> Summary:
    """Write a table of hard negatives: for each image of an index, captions of other images that are easily taken for its own.

    A negative has one of the highest scores among the captions of other images, by retrieval vectors (a fusion score is not
    used). It is left out where its score is not a margin below the positive's; where it may be right, because its text is, or
    its text's vector is similar to, that of a caption of the image; and where it repeats another. Images with the same id are
    one image.

    The table is tab-separated, with a header and quotes where needed (Python's ``csv`` with ``delimiter="\\t"``). Each negative
    is one line, in the order of the index and then of the scores; line breaks within captions become spaces:

    - ``key``: the image's key; ``caption``, ``score``: the positive that the margins count from;
    - ``negative``, ``negative_key``, ``negative_score``: the caption that is wrong for it, and the image that it belongs to;
    - ``rank``: among the captions of other images, from 1; ``similarity``: the cosine with the image's most similar caption.

    Args:
        index: of images and their captions, opened.
        path: the table to write, atomically. An existing file is replaced.
        **options: of :class:`~coder_plugin.search.mining_options.MiningOptions`, such as ``num_negatives=3``.

    Returns:
        What was found and what was left out.

    Raises:
        CoderError: an option that is not allowed; an index without vectors of both kinds, or a damaged one.
        TypeError: an unknown option.

    Example:
        >>> import tempfile, coder_plugin
        >>> from coder_plugin.pretrained.export import export_model
        >>> from coder_plugin.search.build import build_index
        >>> from coder_plugin.search.embed import EmbedJob
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = export_model(coder_plugin.create_model("coder-tiny", loss="clip"), folder / "model")
        >>> names = {"model": str(folder / "model"), "data": "scenes", "output": str(folder / "index" / "embeddings")}
        >>> _ = build_index(folder / "index", EmbedJob(**names, options={"workers": 0}))
        >>> index = Index(folder / "index")
        >>> found = mine_negatives(index, folder / "negatives.tsv", num_negatives=2, relative_margin=-1.0)
        >>> found.negatives == len((folder / "negatives.tsv").read_text().splitlines()) - 1
        True
    """
    miner = Miner(index, MiningOptions(**options))
    summary = Summary(images=index.size("images"))
    values: dict[str, list[float]] = {
        name: [] for name in ("positive", "negative", "difference", "similarity", "same image")
    }
    with atomic_write(path, "w") as file, Progress(summary.images, what="images") as progress:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(COLUMNS)
        for rows in chunks(index.note["images"], BLOCK):
            mined = miner.mine(rows)
            for each in mined:
                table.writerows(table_rows(each))
                _count(summary, values, each)
            summary.without_captions += len(rows) - len(mined)
            progress.update(len(rows))
    summary.quantiles = {
        name: np.quantile(each, QUANTILES).tolist() if each else [float("nan")] * len(QUANTILES)
        for name, each in values.items()
    }
    return summary


def table_rows(mined: Mined) -> Iterator[tuple[Any, ...]]:
    """The rows of a table for an image; its columns are ``COLUMNS``."""
    for each in mined.negatives:
        numbers = f"{each.score:.6f}", each.rank, f"{each.similarity:.6f}"
        yield mined.image.key, _line(mined.positive.text), f"{mined.score:.6f}", _line(each.caption.text), each.key, *numbers


def _line(text: str) -> str:
    return " ".join(text.replace("\0", " ").split())


def _count(summary: Summary, values: Mapping[str, list[float]], mined: Mined) -> None:
    summary.by_count[len(mined.negatives)] += 1
    summary.candidates += mined.candidates
    summary.dropped.update(mined.dropped)
    values["positive"].append(mined.score)
    values["negative"] += [each.score for each in mined.negatives]
    values["difference"] += [mined.score - each.score for each in mined.negatives]
    values["similarity"] += [each.similarity for each in mined.negatives]
    if mined.own_similarity is not None:
        values["same image"].append(mined.own_similarity)
