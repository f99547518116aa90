"""Which characters of a caption each token of a tokenizer's ids [B, T] covers.

Our tokenizers report it themselves. open_clip's return ids only, so their cleaning and splitting is repeated here with
positions, and compared with the ids of the tokenizer; a caption whose ids differ is reported as not matched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from coder_plugin.backbones.tokenizers import Located, Span
from coder_plugin.backbones.transformers_files import TransformersTokenizer
from coder_plugin.errors import CoderError

Locate = Callable[[list[str]], tuple[Tensor, list[Located]]]


def locator(tokenizer: Any) -> Locate:
    """A function from captions to the tokenizer's ids and the characters that they cover.

    Raises:
        CoderError: a tokenizer that neither has the method ``located`` nor is open_clip's, or a slow one of transformers.
    """
    if hasattr(tokenizer, "located"):
        return tokenizer.located
    from open_clip.tokenizer import HFTokenizer, SigLipTokenizer, SimpleTokenizer

    if isinstance(tokenizer, SimpleTokenizer):
        return partial(_by_word, tokenizer)
    kind = type(tokenizer).__name__
    if isinstance(tokenizer, (HFTokenizer, SigLipTokenizer, TransformersTokenizer)):
        if tokenizer.tokenizer.is_fast:
            return partial(_by_offset, tokenizer)
        kind = type(tokenizer.tokenizer).__name__
    raise CoderError(
        f"word classes need a tokenizer that reports which characters a token covers; {kind} does not: use a model with one "
        "of open_clip's or a fast one of transformers (your own tokenizer: add the method located)"
    )


def _by_word(tokenizer: Any, captions: list[str]) -> tuple[Tensor, list[Located]]:
    """For open_clip's byte-pair tokenizer, which encodes each word separately."""
    from open_clip.tokenizer import basic_clean

    ids, located = tokenizer(captions), []
    for caption, row in zip(captions, ids.tolist(), strict=True):
        view = tokenizer.clean_fn(caption)
        pieces: list[tuple[int, Span]] = []
        for match in tokenizer.pat.finditer(view):
            word = "".join(tokenizer.byte_encoder[byte] for byte in match.group().encode("utf-8"))
            pieces += [(tokenizer.encoder[piece], match.span()) for piece in tokenizer.bpe(word).split(" ")]
        pieces = pieces[: len(row) - 2]
        expected = [tokenizer.sot_token_id, *(piece for piece, _ in pieces), tokenizer.eot_token_id]
        matched = row == expected + [0] * (len(row) - len(expected))
        spans = [span for _, span in pieces]
        if not matched:  # some ways of shortening a text drop other words
            spans = [(0, len(view))] * (row.index(tokenizer.eot_token_id) - 1)
        located.append(Located(basic_clean(caption), view, [(0, 0), *spans], matched))
    return ids, located


def _by_offset(tokenizer: Any, captions: list[str]) -> tuple[Tensor, list[Located]]:
    """For wrappers, open_clip's and ours, around a fast tokenizer of transformers, which returns offsets."""
    from open_clip.tokenizer import basic_clean, canonicalize_text

    ids, inner = tokenizer(captions), tokenizer.tokenizer
    clean = getattr(tokenizer, "clean_fn", lambda text: canonicalize_text(basic_clean(text)))
    views = [clean(caption) for caption in captions]
    no_text = {*inner.all_special_ids, inner.pad_token_id}
    clips = getattr(tokenizer, "tokenizer_mode", "") == "clips"
    stripped = inner.sep_token_id if getattr(tokenizer, "strip_sep_token", False) else None
    options = {"max_length": ids.shape[1], "padding": "max_length", "truncation": True}
    encoded = inner(views, **({"add_special_tokens": False} if clips else options))
    located = []
    for caption, view, row, encoding in zip(captions, views, ids.tolist(), encoded.encodings, strict=True):
        # byte-level tokenizers give a space token no character; it belongs to the word after it
        widths = [0 if special else 1 for special in encoding.special_tokens_mask]
        spans = [(start, max(end, start + width)) for (start, end), width in zip(encoding.offsets, widths, strict=True)]
        expected = encoding.ids
        if clips:  # start, text, end, padding, class
            expected, spans = expected[: len(row) - 3], [(0, 0), *spans[: len(row) - 3]]
            expected = [inner.bos_token_id, *expected, inner.eos_token_id]
            expected = [*expected, *[inner.pad_token_id] * (len(row) - 1 - len(expected)), inner.cls_token_id]
        matched = row == [0 if token == stripped else token for token in expected]
        if not matched:
            spans = [(0, 0) if token in no_text else (0, len(view)) for token in row]
        located.append(Located(basic_clean(caption), view, spans, matched))
    return ids, located
