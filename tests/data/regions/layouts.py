"""Write region files as the field's tools do, for tests of their readers."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from coder_plugin.data.regions.base import Record, Regions

BUA_FIELDS = "image_id image_w image_h num_boxes boxes features".split()
LXMERT_FIELDS = "img_id img_h img_w objects_id objects_conf attrs_id attrs_conf num_boxes boxes features".split()


def write_tsv(path: str | Path, records: Iterable[Record], *, lxmert: bool = False) -> None:
    """bottom-up-attention's ``csv.DictWriter``, or LXMERT's layout; lines end in LF."""
    fields = LXMERT_FIELDS if lxmert else BUA_FIELDS
    id_field, width, height = ("img_id", "img_w", "img_h") if lxmert else ("image_id", "image_w", "image_h")
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, delimiter="\t", lineterminator="\n")
        for name, regions, _ in records:
            arrays = {"boxes": regions.boxes, "features": regions.features.astype(np.float32)}
            arrays |= regions.extras if lxmert else {}
            row = {key: base64.b64encode(array.tobytes()).decode() for key, array in arrays.items()}
            sizes = {width: f"{regions.size[0]:.17g}", height: f"{regions.size[1]:.17g}"}
            writer.writerow({id_field: name, "num_boxes": len(regions), **sizes, **row})


def write_lxmert(path: str | Path, records: Iterable[Record]) -> None:
    write_tsv(path, records, lxmert=True)


def write_hdf5(path: str | Path, records: Iterable[Record]) -> None:
    """BAN's flat layout."""
    import h5py

    records = list(records)
    every = [each.regions for each in records]
    ends = np.cumsum([0, *map(len, every)])
    with h5py.File(path, "w") as file:
        file["image_features"] = np.concatenate([each.features for each in every])
        file["pos_boxes"] = np.stack([ends[:-1], ends[1:]], 1)
        names = np.array([each.name.encode() for each in records], object)
        file.create_dataset("image_ids", data=names, dtype=h5py.string_dtype())
        boxes = np.concatenate([each.fractions for each in every])
        file["spatial_features"] = np.concatenate([boxes, boxes[:, 2:] - boxes[:, :2]], 1)


def write_lmdb(path: str | Path, records: Iterable[Record]) -> None:
    """``.npz`` values and the list ``__keys__``, as UNITER's."""
    import lmdb

    names = []
    environment = lmdb.open(str(path), map_size=1 << 40, lock=False)
    with environment.begin(write=True) as transaction:
        for name, regions, _ in records:
            buffer = io.BytesIO()
            np.savez(buffer, **bua_arrays(regions))
            transaction.put(name.encode(), buffer.getvalue())
            names.append(name)
        transaction.put(b"__keys__", json.dumps(names).encode())
    environment.close()


def write_folder(path: str | Path, records: Iterable[Record]) -> None:
    """An ``.npz`` file an image, as bottom-up-attention.pytorch's."""
    for name, regions, _ in records:
        target = Path(path, f"{name}.npz")
        target.parent.mkdir(parents=True, exist_ok=True)
        np.savez(target, **bua_arrays(regions))


def bua_arrays(regions: Regions) -> dict[str, np.ndarray]:
    arrays = {"x": regions.features, "num_bbox": len(regions), "image_w": regions.size[0], "image_h": regions.size[1]}
    if regions.boxes is not None:
        arrays["bbox"] = regions.boxes
    if regions.global_feature is not None:
        arrays["whole"] = regions.global_feature
    return {**arrays, **regions.extras}
