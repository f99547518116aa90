"""Our losses for sentence-transformers' trainer: :class:`CoderLoss`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from coder_plugin import distributed
from coder_plugin.data.item import NO_TEXT, UNKNOWN_IMAGE
from coder_plugin.errors import CoderError
from coder_plugin.following import clamp_logit_scale, follow
from coder_plugin.integrations.sentence_transformers.heads import fit_heads
from coder_plugin.integrations.sentence_transformers.module import PictureText
from coder_plugin.model import create_loss


class CoderLoss(nn.Module):
    """A loss expression for ``SentenceTransformerTrainer``, over a column of pictures and a column of their captions.

    Pictures of equal pixels are one image for the losses that mask captions of the same image. A column ``label`` of integers
    names the images instead, as it must where pictures are augmented at random.

    The model gets the heads that the loss needs, if it lacks them. Banks, momentum towers and centres advance with the steps
    of whatever optimizer steps the model's weights, and a trained ``logit_scale`` stays below log(100): the trainer needs no
    callback. Over several processes the losses gather the pairs of all.

    Args:
        model: a ``SentenceTransformer`` of one :class:`PictureText`.
        loss: a loss expression, term objects, or an objective, as in :func:`coder_plugin.create_model`.
        options: of :func:`coder_plugin.create_loss`.

    Raises:
        CoderError: another ``SentenceTransformer``, or a loss that its model cannot serve.

    Example:
        >>> import coder_plugin
        >>> from sentence_transformers import SentenceTransformer
        >>> module = PictureText(coder_plugin.create_model("coder-tiny", loss="clip + dcl"))
        >>> loss = CoderLoss(SentenceTransformer(modules=[module]), "clip + dcl")
        >>> pictures = {"pixel_values": torch.rand(2, 3, 64, 64), "image_id": torch.tensor([1, 2])}
        >>> sorted(loss([pictures, module.preprocess(["a red circle", "a dog"])]))
        ['clip_loss', 'dcl_loss']
    """

    def __init__(self, model: Any, loss: Any, **options: Any) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise CoderError(f"the order is CoderLoss(model, loss): the model comes first, got a {type(model).__name__}")
        names, modules = zip(*model.named_children(), strict=True)
        if len(modules) != 1 or not isinstance(modules[0], PictureText):
            types = ", ".join(type(each).__name__ for each in modules)
            raise CoderError(
                f"CoderLoss needs a SentenceTransformer of one PictureText, and this one has {types}: "
                "SentenceTransformer(modules=[PictureText(model)]), or a folder that coder_plugin.save_pretrained wrote"
            )
        inner = modules[0].model
        fit_heads(inner, loss)
        self.model = model  # the trainer replaces it by its DDP wrapper
        self.loss = create_loss(loss, model=inner, **options)
        self._reads_negatives = any("coder_negative_ids" in binding.values() for binding in self.loss.bindings)
        self._inner = (inner,)  # in a tuple: it is in self.model already
        self._heads = (dict(inner.coder.heads.items()),)
        state_names = [f"{names[0]}.model.{name}" for name in inner.coder.state_names()]
        if state_names:
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, state_names)
        self._state_is_shared = False
        self._followed: set[int] = set()  # the parameters that the followed optimizer steps
        self._optimizer: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that one
        self._earlier: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # those before it, of other parameters
        _follow_every_optimizer(self)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> dict[str, Tensor]:
        """The features of the columns -> weighted scalars by name, which the trainer adds and logs.

        Args:
            sentence_features: of a column of B pictures, one of B texts, and, after the latter, any of hard negatives, texts
                that are wrong for the pictures; an empty one is none.
            labels: the images' ids, int64 [B]; None: by their pixels.

        Raises:
            CoderError: other columns, labels that are no integers, hard negatives that the loss does not read, or none
                where it reads them, or another model than the loss was made for.
        """
        if next(self.model.parameters()) is not next(self._inner[0].parameters()):
            raise CoderError(
                "the trainer trains another model than the one that this loss was made for: with model_init, give the trainer "
                "loss=lambda model: CoderLoss(model, …)"
            )
        heads = self._inner[0].coder.heads
        if other := [name for name, head in self._heads[0].items() if name not in heads or heads[name] is not head]:
            raise CoderError(
                f"another CoderLoss of this model, made later, has built the head {other[0]!r} again with other options, and "
                "this loss reads the earlier one: give both losses the same options of heads"
            )
        if not self._state_is_shared:
            self._share_state()
        pairs = _pairs(list(sentence_features), labels)
        if "text_negatives" in pairs and not self._reads_negatives:
            raise CoderError(
                f"the loss {self.loss.objective} reads no hard negatives, and there is a second column of texts: write "
                "clip(hard_negatives=true), or so for dcl, m_dcl or triplet, or leave the column out"
            )
        if self._reads_negatives and "text_negatives" not in pairs:
            raise CoderError(
                f"the loss {self.loss.objective} reads hard negatives, and the data set has no column of them: add one of "
                "texts after the captions' (an empty text is none), or leave out hard_negatives=true"
            )
        return self.loss(**self.model(pairs))

    def get_config_dict(self) -> dict[str, str]:
        """What the model card says about the loss."""
        return {"loss": str(self.loss.objective)}

    def _share_state(self) -> None:
        """Start all processes with rank 0's banks and momentum towers, as DDP does with the weights."""
        inner = self._inner[0]
        state = inner.state_dict(keep_vars=True)
        for name in inner.coder.state_names():
            if name in state:
                distributed.broadcast(state[name].data)
        self._state_is_shared = True

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow an optimizer that is about to step the model's weights, unless the model follows it already.

        Raises:
            CoderError: an optimizer of other parameters has stepped since this one's last step.
        """
        inner = self._inner[0]
        following = inner.coder.followed_by
        if following is not None and following.advances_with(optimizer):
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in stepped for parameter in inner.parameters()):
            return
        if optimizer in self._earlier and not self._followed & stepped:
            raise CoderError(
                "two optimizers step parts of the model in turn, so its banks and momentum towers would advance twice a step: "
                "call coder_plugin.follow(model, [one, other]) before training, or give all parameters to one optimizer"
            )
        if following is not None:
            following.remove()  # of an earlier training
            if not self._followed & stepped:
                self._earlier.update(self._optimizer)
        self._followed, self._optimizer = stepped, weakref.WeakSet([optimizer])
        follow(inner, optimizer, after_step=lambda: clamp_logit_scale(inner))


def _pairs(columns: list[dict[str, Tensor]], labels: Tensor | None) -> dict[str, Tensor]:
    """The columns' features as those of pairs, for :meth:`PictureText.forward`."""
    kinds = [_kind(each) for each in columns]
    if kinds.count("pictures") != 1 or not 1 <= kinds.count("texts") == len(columns) - 1:
        raise CoderError(
            "CoderLoss needs one column of pictures and one of their captions, and after it any of hard negatives "
            f"(dataset.select_columns(['image', 'caption'])); the columns hold: {', '.join(kinds) or 'nothing'}"
        )
    pictures = columns[kinds.index("pictures")]
    caption, *negatives = (each for each, kind in zip(columns, kinds, strict=True) if kind == "texts")
    ids = pictures.get("image_id") if labels is None else labels
    if ids is None or ids.is_floating_point() or ids.ndim != 1:
        raise CoderError("the column 'label' must hold an integer for each image; without it, pictures of equal pixels are one")
    pairs = {"pixel_values": pictures["pixel_values"], "input_ids": caption["input_ids"], "image_id": ids}
    if negatives:
        pairs["text_negatives"] = torch.stack([each["input_ids"] for each in negatives], 1)
        empty = torch.stack([each["is_empty"] for each in negatives], 1)
        pairs["text_negative_ids"] = torch.where(empty, NO_TEXT, UNKNOWN_IMAGE)
    return pairs


def _kind(features: dict[str, Tensor]) -> str:
    kinds = {"pixel_values": "pictures", "input_ids": "texts"}
    return " and ".join(kind for key, kind in kinds.items() if key in features)


def _follow_every_optimizer(loss: CoderLoss) -> None:
    """Call ``loss._before_step`` before the steps of every optimizer, while the loss exists: the trainer makes its optimizer
    after the loss."""
    reference: Any = weakref.ref(loss, lambda _: handle.remove())

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (alive := reference()) is not None:
            alive._before_step(optimizer)

    handle = register_optimizer_step_pre_hook(before_step)
