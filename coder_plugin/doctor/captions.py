"""Captions: readable, how many per image, repeated, truncated, badly encoded; their words in vocabularies and vectors."""

from __future__ import annotations

import html
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from coder_plugin.data.bad_samples import allowed
from coder_plugin.doctor.findings import Finding, listed, many, note, ok, one_line, problem, share, some, warning
from coder_plugin.doctor.split import Split
from coder_plugin.errors import CoderError

#: UTF-8 that was decoded as Latin-1 or Windows-1252: the bytes of an accented letter or of a quotation mark.
_MOJIBAKE = re.compile("[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac|\ufffd")
_MARKUP = re.compile(r"</?[a-zA-Z][^<>]*>|&(?:[a-zA-Z]{2,8}|#\d+);")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_TEXTS = 20_000  # captions that are tokenised
_AMBIGUOUS = 0.01  # share of captions that several images share, above which recall suffers
_FEW = 0.9  # share of running text that word vectors should cover
_MISSING = 0.1  # share of the concepts that may have random vectors


def check_reading(split: Split, max_bad_samples: float) -> Iterator[Finding]:
    """Shards and samples that cannot be read."""
    name = split.name
    if split.shards:
        do = "make or download these shards again (tar tf FILE lists the readable part); training would stop at them"
        yield problem(
            f"{name}.shards.broken", f"{many(len(split.shards), 'damaged shard')}: {listed(split.shards)}", do
        )
    if split.samples:
        level = problem if len(split.samples) > allowed(max_bad_samples, len(split.items)) or not split.items else warning
        do = f"fix them or leave them out: they are skipped, and more than {max_bad_samples:g} (--max-bad-samples) end a run"
        yield level(
            f"{name}.samples.refused", f"{many(len(split.samples), 'sample')} refused: {listed(split.samples)}", do
        )
    if split.pictureless:
        level = problem if len(split.pictureless) > allowed(max_bad_samples, len(split.items)) else warning
        do = f"leave them out of the shards: they are skipped, and more than {max_bad_samples:g} (--max-bad-samples) end a run"
        yield level(
            f"{name}.samples.pictureless",
            f"{many(len(split.pictureless), 'sample')} without a picture: {some(split.pictureless)}",
            do,
        )
    if split.remote:
        do = "nothing is downloaded: run doctor on the machine that has them, or on a copy of some"
        yield note(f"{name}.shards.remote", f"not checked: {many(split.remote, 'shard')} not on this machine", do)
    if split.left:
        text = f"only the first {len(split.items):,} images were read; findings on the split are about these"
        yield note(f"{name}.partial", text, "--all reads all")
    if not split.items and not split.remote:
        yield problem(f"{name}.empty", f"no image of {split.source.name} can be read", "see the findings above")


def check_captions(split: Split) -> Iterator[Finding]:
    name, items = split.name, split.items
    counts = [len(item.captions) for item in items]
    texts = sum(counts)
    least, middle, most = min(counts), statistics.median_low(counts), max(counts)
    each = f"{least}" if least == most else f"{least} to {most} (median {middle})"
    text = f"{split.source.name} ({split.reader}): {len(items):,} images, {texts:,} captions, {each} per image"
    yield ok(f"{name}.captions", text)
    if name == "val" and least != most:
        few = sum(count != middle for count in counts)
        text = f"{share(few, len(items))} images do not have {middle} captions"
        do = "fine, but recall is not comparable with papers, which use five captions per image"
        yield note(f"{name}.captions.uneven", text, do)
    yield from _repeats(split, texts)
    yield from _spelling(split, texts)


def _repeats(split: Split, texts: int) -> Iterator[Finding]:
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
        do = "harmless, but --captions all trains on the same pair twice"
        text = f"{share(len(twice), len(split.items))} images have the same caption twice: {some(twice)}"
        yield note(f"{name}.captions.twice", text, do)
    shared = {caption: keys for caption, keys in owners.items() if len(keys) > 1}
    if shared:
        caption, keys = max(shared.items(), key=lambda pair: (len(pair[1]), pair[0]))
        count = sum(len(keys) for keys in shared.values())
        text = (
            f"{share(count, texts)} captions are shared word for word by other images; {caption!r} by {len(keys)}: "
            f"{some(sorted(keys))}"
        )
        many = count > _AMBIGUOUS * texts
        if name == "val":
            do = "recall counts only one of these images as right: remove template captions, or expect less than 100 %"
        else:
            do = "as each other's negatives they are wrong training signal: leave them out, or keep batches small"
        yield (warning if many else note)(f"{name}.captions.shared", text, do)


def _plain(caption: str) -> str:
    return " ".join(caption.lower().split())


def _spelling(split: Split, texts: int) -> Iterator[Finding]:
    def matching(wrong: Callable[[str], Any]) -> list[str]:
        return [caption for item in split.items for caption in item.captions if wrong(caption)]

    name = split.name
    for what, pattern, text, do in (
        ("encoding", _MOJIBAKE, "were decoded with the wrong encoding", "write them again from the source, as UTF-8"),
        (
            "markup",
            _MARKUP,
            "hold HTML",
            "unescape them and strip tags (open_clip's tokenizer unescapes, taggers do not)",
        ),
        ("control", _CONTROL, "hold control characters", "strip them"),
    ):
        if captions := matching(pattern.search):
            yield warning(
                f"{name}.captions.{what}", f"{share(len(captions), texts)} captions {text}: {some(captions)}", do
            )
    if captions := matching(lambda caption: len(html.unescape(caption).split()) < 2):
        text = f"{share(len(captions), texts)} captions are a single word: {some(captions)}"
        yield note(f"{name}.captions.short", text, "turn class names into sentences, or leave them out")


def check_lengths(split: Split, tokenizer: Callable[[list[str]], Any]) -> Iterator[Finding]:
    """Captions that the tokenizer truncates: further words do not change their tokens."""
    name = split.name
    texts = [caption for item in split.items for caption in item.captions]
    texts = texts[:: -(-len(texts) // _TEXTS)]
    width = tokenizer(["a"]).shape[1]
    long = [
        text for text in texts if len(text.encode("utf-8", "surrogatepass")) + 2 >= width
    ]  # a token is at least one byte
    cut = [text for text, more in zip(long, _cut(long, tokenizer), strict=True) if more]
    longest = max(texts, key=lambda text: len(text.split()))
    words = len(longest.split())
    if not cut:
        yield ok(
            f"{name}.captions.length",
            f"captions of up to {words} words fit into {width} tokens ({len(texts):,} checked)",
        )
        return
    text = (
        f"{share(len(cut), len(texts))} captions fill all {width} tokens and are truncated, such as {_start(cut[0])!r}"
    )
    do = (
        "shorten them, or use a longer context: --open-clip force_context_length=N (open_clip's models), "
        "--model-kwargs context_length=N (ours)"
    )
    yield (warning if len(cut) > 0.01 * len(texts) else note)(f"{name}.captions.long", text, do)


def _cut(texts: Sequence[str], tokenizer: Callable[[list[str]], Any]) -> Iterator[bool]:
    for start in range(0, len(texts), 512):
        part = list(texts[start : start + 512])
        yield from (tokenizer(part) == tokenizer([f"{text} dog dog dog" for text in part])).all(1).tolist()


def _start(text: str) -> str:
    return text if len(text) < 80 else f"{text[:79]}…"


def check_same_captions(train: Split, val: Split) -> Iterator[Finding]:
    """Images of two splits that have exactly the same captions, and so are probably the same image."""
    keys = {frozenset(map(_plain, item.captions)): item.key for item in train.items}
    single = Counter(len(item.captions) for item in val.items).most_common(1)[0][0] == 1
    same = [(keys[texts], item.key) for item in val.items if (texts := frozenset(map(_plain, item.captions))) in keys]
    if not same:
        return
    pairs = listed(f"{ours!r} = {theirs!r}" for ours, theirs in same)
    text = (
        f"{share(len(same), len(val.items))} validation images have exactly the captions of a training image: {pairs}"
    )
    if single:
        yield note("leak.captions", text, "with one caption per image this can be chance: look at them")
    else:
        yield warning("leak.captions", text, "they are most likely the same images: leave them out of training")


# -- concept vocabularies and word vectors ---------------------------------------------------------------------------------


def count_words(captions: Iterable[str]) -> Counter[str]:
    """Words of the captions in lower case, letters with hyphens and apostrophes inside, with their counts."""
    from coder_plugin.concepts.tagging import clean, is_word

    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update(
            word for word in (part.strip(".,;:!?\"'()[]") for part in clean(caption).split()) if is_word(word)
        )
    return counts


def check_concepts(path: str, words: Counter[str]) -> Iterator[Finding]:
    """A file of ``coder-plugin concepts``: readable, with vectors, and made from these captions.

    Args:
        path: the file.
        words: of the training captions; empty without captions.
    """
    from coder_plugin.concepts.vocabulary import load_vocabulary

    try:
        vocabulary = load_vocabulary(path)
    except CoderError as error:
        yield problem(
            "words.concepts", one_line(error), "make it again: coder-plugin concepts --train-data … --output FILE"
        )
        return
    size, dim = vocabulary.vectors.shape
    yield ok(
        "words.concepts",
        f"{path}: {size} concepts, vectors of {dim} dimensions, from {vocabulary.settings.get('source')}",
    )
    if missing := vocabulary.missing:
        text = f"{share(len(missing), size)} concepts have a random vector because the word vectors lack them: {some(missing)}"
        level = warning if len(missing) > _MISSING * size else note
        yield level(
            "words.concepts.random", text, "make it with vectors of more words: --vectors (GloVe has most words)"
        )
    if not words:
        return
    forms = vocabulary.settings.get("surface_vectors") or {}
    absent = [word for word in vocabulary.words if not _occurs(word, words) and forms.get(word) not in words]
    if len(absent) > size / 4:
        text = f"{share(len(absent), size)} concepts occur in no training caption: {some(absent)}"
        do = "if the file was made from other captions, make it from these: coder-plugin concepts --train-data …"
        yield warning("words.concepts.absent", text, do)
    else:
        yield ok("words.concepts.used", f"{size - len(absent)} of {size} concepts occur in the training captions")


def _occurs(word: str, words: Counter[str]) -> bool:
    """Whether a lemma occurs in one of its regular English forms; irregular ones are missed."""
    stems = (word, word.removesuffix("e"), word.removesuffix("y") + "i", word + word[-1])
    return any(stem + ending in words for stem in stems for ending in ("", "s", "es", "ed", "ing", "d"))


def check_vectors(path: str, words: Counter[str]) -> Iterator[Finding]:
    """A file of word vectors: readable, and how many of the captions' words it has."""
    from coder_plugin.concepts.vectors import WordVectors

    try:
        vectors = WordVectors(path).read(words.keys())
    except CoderError as error:
        do = "a GloVe or word2vec text file (.gz, .zip too); download it again, or remove the broken line"
        yield problem("words.vectors", one_line(error), do)
        return
    yield ok("words.vectors", f"{path}: {vectors.dim} dimensions, standard deviation {vectors.sigma:.3g}")
    if not words:
        yield note("words.vectors.words", "without captions their words were not looked up", "add --train-data")
        return
    running, covered = words.total(), sum(words[word] for word in vectors.vectors)
    have = share(len(vectors.vectors), len(words))
    text = f"{have} words of the captions have a vector, {100 * covered / running:.1f} % of running text"
    if covered < _FEW * running:
        lacking = [word for word, _ in words.most_common() if word not in vectors.vectors]
        do = "use vectors of more words (GloVe's have 400,000), in lower case and in the captions' language"
        yield warning("words.vectors.few", f"{text}; missing, most frequent first: {some(lacking)}", do)
    else:
        yield ok("words.vectors.words", text)
