"""What a head is: a module inside ``model.coder`` that turns keys into further keys, and may keep state."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

#: What BatchNorm writes in forward: not our state.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, kw_only=True)
class Widths:
    """What a backbone tells its heads: the joint dimension D, the channels of its tokens, of what stands before (locals) and
    after (contexts) its context stage and of a feature of the whole image (0: it has none), how many features an image has,
    and how many tokens its tokenizer knows."""

    embed_dim: int
    image_tokens: int = 0
    text_tokens: int = 0
    image_locals: int = 0
    text_locals: int = 0
    image_contexts: int = 0
    text_contexts: int = 0
    image_global: int = 0
    views: int = 1
    vocabulary: int = 0


class Head(nn.Module):
    """Base of all heads (DESIGN, rules 2-4).

    A subclass takes :class:`Widths` and its options (keyword-only), names the keys it ``requires``, those it ``uses`` when
    they are there, and those it ``provides``, and is called inside the model's forward with exactly the first two. Keys
    that start with ``coder_`` leave the model and must be batch-first and of fixed shape; others stay inside, for later
    heads.

    State is persistent buffers. Forward never writes them: a loss term hands the new values to :meth:`stash`, and
    :meth:`post_step` writes them, once per performed optimizer step.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    #: Never a reason to build another head.
    uses: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]] = ()
    #: Keys that stand in for (image_features, text_features) in ``term@head``.
    pair: ClassVar[tuple[str, str] | None] = None
    #: Whether it takes part in the score: then it has the ``score_weights`` and the blocks, from the backbone's keys alone.
    scores: ClassVar[bool] = False
    #: Whether its part of the score is added to that of all others, which it leaves as they are.
    adds_score: ClassVar[bool] = False
    #: Whether it wants texts encoded beside the captions: then it has ``further_texts`` and ``positives`` (heads/asymmetry.py).
    adds_texts: ClassVar[bool] = False
    #: Whether its outputs are of all pairs of a batch, so that the batches of an accumulated step cannot be run one by one.
    whole_batch: ClassVar[bool] = False
    #: Whether it scores pairs that a shortlist has found: then it has ``image_item``, ``text_item`` and ``scorer``.
    reranks: ClassVar[bool] = False

    #: The classes of words that it reads in ``text_tags``, if it does: the trainer then has captions tagged.
    reads_tags: tuple[int, ...] = ()

    #: The keys that terms and heads of the objective read; what is not among them need not be computed.
    read: Set[str]

    def __init__(self) -> None:
        super().__init__()
        self.read = frozenset(self.provides)
        self._stashed: Mapping[str, Any] = {}

    def forward(self, *args: Any, **inputs: Any) -> dict[str, Tensor]:
        raise NotImplementedError

    def attach(self, model: Any) -> None:
        """Called when the model is complete, and again when its modules were replaced: a head that follows the model
        takes its copy here."""

    def check(self, *, batch: int, samples: int) -> None:
        """:class:`ValueError` where the head cannot work with a global batch of so many pairs, or a run of so many
        samples in all: trainers call it before the first step."""

    def score_weights(self) -> tuple[float, float]:
        """How a head that ``scores`` does so, ``(base, own)``: ``S <- base * S + own * <image_block, text_block>``."""
        raise NotImplementedError

    def image_block(self, known: Mapping[str, Tensor]) -> Tensor:
        """Its block of an image's retrieval vector [B, F], from what the backbone knows of the image."""
        raise NotImplementedError

    def text_block(self, known: Mapping[str, Tensor]) -> Tensor:
        """Its block of a text's retrieval vector [B, F]."""
        raise NotImplementedError

    def discard(self) -> None:
        """Forget what was stashed: the loss was taken of a batch that is no step."""
        self._stashed = {}

    def stash(self, **values: Any) -> None:
        """Keep what the next :meth:`post_step` is to write; a later stash of the same step replaces it."""
        self._stashed = values

    def post_step(self) -> None:
        """Write what was stashed. Called once after every optimizer step that was performed."""
        values, self._stashed = self._stashed, {}
        if values:
            self.write(**values)

    def write(self, **values: Any) -> None:
        """Put stashed values into this head's buffers; a head with state overrides it."""

    def health(self) -> dict[str, float]:
        """Figures that tell whether the head's state is sound, such as how full a bank is; asked at log steps alone."""
        return {}

    def state_names(self) -> list[str]:
        """Names of accumulating state: left out of weight averaging and of what DDP synchronises (rule 3)."""
        frozen = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]
        norms = [name for name, module in self.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        statistics = {f"{norm}.{name}" if norm else name for norm in norms for name in _STATISTICS}
        return [name for name, _ in self.named_buffers() if name not in statistics] + frozen


def in_score(head: Head | type[Head]) -> bool:
    """Whether evaluation needs the head: exports keep it."""
    return head.scores or head.reranks
