"""A split's captions: how many an image has, which come twice, which are cut, and which have been through a bad conversion."""

from __future__ import annotations

import html
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from coder_plugin.doctor.findings import Finding, listed, many, note, ok, problem, share, some, warning
from coder_plugin.doctor.walk import Walked

#: UTF-8 that was read as Latin-1 or Windows-1252: the bytes of an accented letter, of a quotation mark.
_MOJIBAKE = re.compile("[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac|\ufffd")
_MARKUP = re.compile(r"</?[a-zA-Z][^<>]*>|&(?:[a-zA-Z]{2,8}|#\d+);")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_TEXTS = 20_000  # captions that are tokenised
_AMBIGUOUS = 0.01  # share of captions that stand on several images, from which recall suffers


def check_reading(split: Walked, max_bad: int) -> Iterator[Finding]:
    """What cannot be read without looking at a picture."""
    name = split.name
    if split.shards:
        do = "make or download these shards again (tar tf FILE lists what is left of one); training would stop at them"
        yield problem(f"{name}.shards.broken", f"{many(len(split.shards), 'damaged shard')}: {listed(split.shards)}", do)
    if split.samples:
        do = "mend or leave out these samples: training would stop at the first"
        yield problem(
            f"{name}.samples.refused", f"{many(len(split.samples), 'sample')} refused: {listed(split.samples)}", do
        )
    if split.pictureless:
        level = problem if len(split.pictureless) > max_bad else warning
        do = "they are skipped, until --max-bad-images of them end the run: leave them out of the shards"
        yield level(
            f"{name}.samples.pictureless",
            f"{many(len(split.pictureless), 'sample')} without a picture: {some(split.pictureless)}",
            do,
        )
    if split.remote:
        do = "nothing is downloaded here: run doctor where they are, or on a copy of some"
        yield note(f"{name}.shards.remote", f"not looked at: {many(split.remote, 'shard')} that this machine has not", do)
    if split.left:
        text = f"only {len(split.items):,} images were looked at, not all: what is said of the split is said of them"
        yield note(f"{name}.partial", text, "--all looks at all")
    if not split.items and not split.remote:
        yield problem(f"{name}.empty", f"no image of {split.source.name} can be read", "see the findings before this one")


def check_captions(split: Walked) -> Iterator[Finding]:
    name, items = split.name, split.items
    counts = [len(item.captions) for item in items]
    texts = sum(counts)
    least, middle, most = min(counts), statistics.median_low(counts), max(counts)
    each = f"{least}" if least == most else f"{least} to {most}, {middle} in the middle,"
    text = f"{split.source.name} ({split.reader}): {len(items):,} images, {texts:,} captions, {each} an image"
    yield ok(f"{name}.captions", text)
    if name == "val" and least != most:
        few = sum(count != middle for count in counts)
        text = f"{share(few, len(items))} images have other than {middle} captions"
        do = "fine, but recall is not comparable with papers, which have five captions for each image"
        yield note(f"{name}.captions.uneven", text, do)
    yield from _repeats(split, texts)
    yield from _spelling(split, texts)


def _repeats(split: Walked, texts: int) -> Iterator[Finding]:
    name = split.name
    owners: dict[str, set[str]] = {}
    twice: list[str] = []
    for item in split.items:
        own = [_plain(caption) for caption in item.captions]
        if len(set(own)) < len(own):
            twice.append(item.key)
        for caption in own:
            owners.setdefault(caption, set()).add(item.key)
    if twice:
        do = "harmless; with --captions all the same pair is trained on twice"
        text = f"{share(len(twice), len(split.items))} images have a caption twice: {some(twice)}"
        yield note(f"{name}.captions.twice", text, do)
    shared = {caption: keys for caption, keys in owners.items() if len(keys) > 1}
    if shared:
        caption, keys = max(shared.items(), key=lambda pair: (len(pair[1]), pair[0]))
        count = sum(len(keys) for keys in shared.values())
        text = (
            f"{share(count, texts)} captions stand word for word on other images too; {caption!r} on {len(keys)}: "
            f"{some(sorted(keys))}"
        )
        many = count > _AMBIGUOUS * texts
        if name == "val":
            do = "recall counts only one of these images as right: rid the captions of templates, or expect less than 100"
        else:
            do = "as negatives of each other they teach the wrong thing: leave them out, or keep batches small"
        yield (warning if many else note)(f"{name}.captions.shared", text, do)


def _plain(caption: str) -> str:
    return " ".join(caption.lower().split())


def _spelling(split: Walked, texts: int) -> Iterator[Finding]:
    def those(wrong: Callable[[str], Any]) -> list[str]:
        return [caption for item in split.items for caption in item.captions if wrong(caption)]

    name = split.name
    for what, pattern, text, do in (
        ("encoding", _MOJIBAKE, "were read in the wrong encoding once", "write them anew from the source, as UTF-8"),
        ("markup", _MARKUP, "hold HTML", "unescape them and strip tags (open_clip's tokenizer unescapes, taggers do not)"),
        ("control", _CONTROL, "hold control characters", "strip them"),
    ):
        if found := those(pattern.search):
            yield warning(f"{name}.captions.{what}", f"{share(len(found), texts)} captions {text}: {some(found)}", do)
    if found := those(lambda caption: len(html.unescape(caption).split()) < 2):
        text = f"{share(len(found), texts)} captions are a single word: {some(found)}"
        yield note(f"{name}.captions.short", text, "class names are better put into sentences; else leave them out")


def check_lengths(split: Walked, tokenizer: Callable[[list[str]], Any]) -> Iterator[Finding]:
    """Which captions the tokenizer cuts: those to which further words add nothing."""
    name = split.name
    texts = [caption for item in split.items for caption in item.captions]
    texts = texts[:: -(-len(texts) // _TEXTS)]
    width = tokenizer(["a"]).shape[1]
    long = [text for text in texts if len(text.encode("utf-8", "surrogatepass")) + 2 >= width]  # a token is a byte at least
    cut = [text for text, more in zip(long, _cut(long, tokenizer), strict=True) if more]
    longest = max(texts, key=lambda text: len(text.split()))
    words = len(longest.split())
    if not cut:
        yield ok(
            f"{name}.captions.length", f"captions of up to {words} words fit into {width} tokens ({len(texts):,} looked at)"
        )
        return
    text = f"{share(len(cut), len(texts))} captions fill all {width} tokens and lose what is beyond, such as {_start(cut[0])!r}"
    do = "shorten them, or take a longer context: --force-context-length (open_clip's), --model-kwargs context_length= (ours)"
    yield (warning if len(cut) > 0.01 * len(texts) else note)(f"{name}.captions.long", text, do)


def _cut(texts: Sequence[str], tokenizer: Callable[[list[str]], Any]) -> Iterator[bool]:
    for start in range(0, len(texts), 512):
        part = list(texts[start : start + 512])
        yield from (tokenizer(part) == tokenizer([f"{text} dog dog dog" for text in part])).all(1).tolist()


def _start(text: str) -> str:
    return text if len(text) < 80 else f"{text[:79]}…"


def check_same_captions(train: Walked, val: Walked) -> Iterator[Finding]:
    """Images of two splits that have all captions in common: one image, whatever its name."""
    known = {frozenset(map(_plain, item.captions)): item.key for item in train.items}
    single = Counter(len(item.captions) for item in val.items).most_common(1)[0][0] == 1
    same = [(known[texts], item.key) for item in val.items if (texts := frozenset(map(_plain, item.captions))) in known]
    if not same:
        return
    pairs = listed(f"{ours!r} = {theirs!r}" for ours, theirs in same)
    text = f"{share(len(same), len(val.items))} validation images have exactly the captions of a training image: {pairs}"
    if single:
        yield note("leak.captions", text, "with one caption an image this happens by chance: look at them")
    else:
        yield warning("leak.captions", text, "most likely they are the same images: leave them out of training")
