"""Open an index with the model that its manifest names, and a picture to search it by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from coder_plugin.errors import CoderError
from coder_plugin.index.search import Index, Searcher


def open_searcher(
    folder: str | Path,
    *,
    model: str | None = None,
    verify: bool = False,
    parameters: str | None = None,
    gpu: bool = True,
    need_model: bool = True,
    device: torch.device | None = None,
    reranker: str | None = None,
) -> Searcher:
    """Open an index together with the model that its manifest names.

    Args:
        folder: of the index.
        model: the model's folder, if it has moved since; None: where the manifest says.
        verify: as in :class:`~coder_plugin.index.search.Index`.
        parameters: as in :class:`~coder_plugin.index.search.Index`.
        gpu: as in :class:`~coder_plugin.index.search.Index`.
        need_model: False: open the model only if re-ranking needs it; texts and pictures then cannot be encoded.
        device: of the model; None: this process's GPU, or the CPU.
        reranker: that whose tokens the index keeps, with other options or from another package
            (:func:`~coder_plugin.pretrained.open.open_pretrained`); None: as the index was made, if the re-ranker is ours.

    Raises:
        CoderError: no index, or a damaged one; its model has been moved, or is another one now; another re-ranker.
    """
    from coder_plugin.pretrained.open import open_pretrained
    from coder_plugin.pretrained.saved_model import check_saved_reranker

    index = Index(folder, verify=verify, parameters=parameters, gpu=gpu)
    record = index.manifest["model"]
    reranks = index.manifest["plan"]["re-ranking"]
    if not need_model and not reranks and reranker is None:
        return Searcher(index, None)
    spec = model or record.get("spec")
    try:
        options = _checked_options(record, model)
        name = str(spec or record.get("name", "the index's model"))
        export = "last" if record.get("export") == "last" else None  # the fingerprint says whether it is the same model
        if reranks and reranker is None and record.get("reranker") is not None:
            reranker = str(record["reranker"])
            check_saved_reranker(reranker, "its manifest")
        pretrained = open_pretrained(spec, options, export=export, name=name, device=device, reranker=reranker)
    except CoderError as error:
        moved = "; if it has moved, name its folder with --model" if model is None and "--model" not in str(error) else ""
        raise CoderError(f"{folder}: its model cannot be opened: {error}{moved}") from error
    return Searcher(index, pretrained)


def _checked_options(record: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """The options that an index's manifest opens its model with. Somebody else may have written them, so they may only describe
    a model, and what would be fetched from where they say is asked for on the command line.

    Raises:
        CoderError: other options, a model elsewhere, or no model at all.
    """
    from coder_plugin.pretrained.saved_model import check_model_record

    options = dict(record.get("options", {}))
    if model is not None:
        options = {name: value for name, value in options.items() if name not in ("model", "pretrained")}
    elif record.get("spec") is None and not isinstance(options.get("model"), str):
        raise CoderError("its manifest names no model")
    return check_model_record({**record, "options": options}, "its manifest", spec=model)["options"]


def load_image(path: str) -> Any:
    """A picture (PIL), or the regions in an ``.npz`` file.

    Raises:
        CoderError: the file cannot be read.
    """
    from coder_plugin.data.decode import decode_image
    from coder_plugin.data.regions.arrays import decode_npz

    try:
        return decode_npz(Path(path).read_bytes(), path) if path.lower().endswith(".npz") else decode_image(path)
    except (OSError, ValueError) as error:
        raise CoderError(f"--image {path} cannot be read: {error}") from error
