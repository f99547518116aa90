"""Commonsense concepts: a graph convolution over word vectors, queried by images and texts (CODER eq. 2, 12-14).

Shapes: B batch, D joint dimension (also that of the concepts), T text tokens of C channels, g concepts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin import distributed
from coder_plugin.backbones.gpo import GPO, Decoder
from coder_plugin.backbones.norm import MaskedBatchNorm, normalize_together
from coder_plugin.concepts import Vocabulary, load_vocabulary, scenes_vocabulary
from coder_plugin.concepts.graph import concept_embedding, concept_graph
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import BackboneInfo, TrainingFacts
from coder_plugin.heads.capabilities import KeepsState, Scores

log = logging.getLogger(__name__)

#: A spread below the first value is a collapse. It is logged once, from the step with the second number on.
_COLLAPSED, _STEPS_TO_SPREAD = 0.05, 100
#: An attention to less than this share of the concepts is logged too.
_NARROW = 0.015


class Concepts(Scores, KeepsState):
    """Images and texts as L2-normalised mixtures of g concepts (docs/equations.md#concepts).

    Requires ``image_pooled`` [B, D], ``text_tokens`` [B, T, C] and bool ``text_mask`` [B, T]. Provides
    ``coder_image_concepts`` and ``coder_text_concepts`` [B, D].

    ``Y = LeakyReLU(A X W)`` with the vocabulary's word vectors X and graph A (eq. 12, 13). An image's query is its pooled
    feature before normalisation; a text's is GPO over the last layer's tokens. Each goes through an encoder, a linear
    layer and BatchNorm over the batch of all ranks, and attends to Y (eq. 2, printed again as eq. 14).

    Scores as ``S = beta S_instance + (1 - beta) S_concepts`` (docs/equations.md#score).

    Args:
        vocabulary: a file that ``coder-plugin concepts`` wrote, or ``scenes`` for the words of the built-in scenes.
            Without one there are 400 random vectors and no graph; the trainer requires one.
        threshold, rescale: of :func:`~coder_plugin.concepts.graph.concept_graph`.
        layers: number of graph convolutions, >= 1. One, as the paper prints it, is followed by LeakyReLU; CVSE has two
            with LeakyReLU between them and none after the last.
        norm: ``batch``: the encoders end in BatchNorm, as CVSE's; ``none``: they are linear. Without it all concept
            embeddings of a modality start alike, and the loss stays for hundreds of steps where attraction and
            repulsion balance.
        scale: factor on the cosines before the attention's softmax (lambda), > 0.
        beta: weight of the instance level in the score, in [0, 1].
        decoder: of the text query's GPO: ``linear``, as released for VSE-infinity, or ``mlp``, as the paper prints.
        tower_gradient: factor on the gradient that enters the towers, in [0, 1]. By default the head learns from the
            towers' features and does not change them; the paper's value is 1.
        warmup: number of steps, >= 0, over which the gradient into the towers grows from zero to its full size, and the
            weight 1 - beta from zero to its value.

    Raises:
        ValueError: options out of range, or a text tower without tokens. CoderError: a vocabulary that cannot be read.

    Example:
        >>> head = Concepts(BackboneInfo(embed_dim=4, text_tokens=6))
        >>> out = head(torch.randn(2, 4), torch.randn(2, 5, 6), torch.ones(2, 5, dtype=torch.bool))
        >>> out["coder_image_concepts"].shape, out["coder_text_concepts"].norm(dim=-1).round(decimals=4).tolist()
        (torch.Size([2, 4]), [1.0, 1.0])
    """

    requires = ("image_pooled", "text_tokens", "text_mask")
    provides = ("coder_image_concepts", "coder_text_concepts")
    feature_keys = ("coder_image_concepts", "coder_text_concepts")
    data_options = ("vocabulary",)
    free_on_resume = ("vocabulary",)  # the file may have moved; its vectors are compared
    fixed_on_resume = {"vectors": "the checkpoint was trained with another concept vocabulary than --concepts names"}

    block_dim: int
    vectors: Tensor
    graph: Tensor
    steps: Tensor

    def __init__(
        self,
        backbone: BackboneInfo,
        *,
        vocabulary: str | None = None,
        threshold: float = 0.3,
        rescale: bool = True,
        layers: int = 1,
        scale: float = 10.0,
        norm: Literal["batch", "none"] = "batch",
        beta: float = 0.9,
        decoder: Decoder = "linear",
        tower_gradient: float = 0.0,
        warmup: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("beta", beta), ("tower_gradient", tower_gradient)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        if norm not in ("batch", "none"):
            raise ValueError(f"norm must be 'batch' or 'none', got {norm!r}")
        if layers < 1 or warmup < 0:
            raise ValueError(f"layers must be >= 1 and warmup >= 0, got {layers} and {warmup}")
        if not backbone.text_tokens:
            raise ValueError("the text query needs the text tower's tokens, and this tower gives none")
        self.scale, self.beta, self.tower_gradient, self.warmup = scale, beta, tower_gradient, warmup
        self.vocabulary = _load(vocabulary)
        if self.vocabulary is None:
            vectors, graph = torch.randn(400, 300, generator=torch.Generator().manual_seed(0)), torch.eye(400)
        else:
            together, counts = self.vocabulary.cooccurrence, self.vocabulary.counts
            vectors = self.vocabulary.vectors.float()
            graph = concept_graph(together, counts, threshold=threshold, rescale=rescale)
        self.register_buffer("vectors", vectors)  # X [g, 300]
        self.register_buffer("graph", graph)  # [g, g]
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        dim = self.block_dim = backbone.embed_dim
        sizes = [vectors.shape[1], *[dim] * layers]
        self.convolutions = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:], strict=False))
        self.text_pool = GPO(decoder=decoder)
        self.image_query = _encoder(dim, dim, norm)
        self.text_query = _encoder(backbone.text_tokens, dim, norm)
        # W^v and W^w start as the identity, the plain cosine: with random matrices the attention would be flat
        self.image_weight = nn.Parameter(torch.eye(dim))
        self.text_weight = nn.Parameter(torch.eye(dim))
        self._sums: Tensor | None = None
        self._warned: set[str] = set()

    @classmethod
    def options_from_data(cls, options: Mapping[str, Any], facts: TrainingFacts) -> dict[str, Any]:
        """The vocabulary that the user named, or that of the built-in scenes."""
        if "vocabulary" in options:
            if facts.concepts:
                raise CoderError(
                    "--concepts and --set concepts.vocabulary (or the objective) both name a vocabulary: give one"
                )
            return {}
        if not (facts.concepts or facts.on_scenes):
            raise CoderError(
                f'--loss "{facts.loss}" needs a concept vocabulary: --concepts FILE, written by coder-plugin concepts '
                f"--train-data {facts.train_data} --vectors glove.6B.300d.txt --output FILE"
            )
        return {"vocabulary": facts.concepts or "scenes"}

    def forward(self, image_pooled: Tensor, text_tokens: Tensor, text_mask: Tensor) -> dict[str, Tensor]:
        inputs = self._image_input(image_pooled), self._text_input(text_tokens, text_mask)
        encoders: tuple[Any, Any] = (self.image_query, self.text_query)
        queries = [encoder[0](values) for encoder, values in zip(encoders, inputs, strict=True)]
        if len(self.image_query) > 1:
            queries = normalize_together([encoder[1] for encoder in encoders], queries)
        concepts = self.concepts()
        images, image_attention = concept_embedding(queries[0], self.image_weight, concepts, scale=self.scale)
        texts, text_attention = concept_embedding(queries[1], self.text_weight, concepts, scale=self.scale)
        if self.training:
            self._measure(images, texts, image_attention, text_attention)
        return {"coder_image_concepts": images, "coder_text_concepts": texts}

    def concepts(self) -> Tensor:
        """Y [g, D]: the concepts after the graph convolution (CODER eq. 13)."""
        hidden = self.vectors
        for number, convolution in enumerate(self.convolutions):
            hidden = self.graph @ convolution(hidden)
            if number == 0 or number < len(self.convolutions) - 1:
                hidden = F.leaky_relu(hidden, 0.2)
        return hidden

    def score_weights(self) -> tuple[float, float]:
        progress = min(1.0, int(self.steps) / self.warmup) if self.warmup else 1.0
        weight = (1 - self.beta) * progress
        return 1 - weight, weight

    @contextlib.contextmanager
    def weighing(self, weight: float) -> Iterator[None]:
        """Inside the context the score uses this beta, without warm-up."""
        saved = self.beta, self.warmup
        self.beta, self.warmup = weight, 0
        try:
            yield
        finally:
            self.beta, self.warmup = saved

    def image_block(self, features: Mapping[str, Tensor]) -> Tensor:
        return self._images(features)[0]

    def text_block(self, features: Mapping[str, Tensor]) -> Tensor:
        return self._texts(features)[0]

    def image_attention(self, features: Mapping[str, Tensor]) -> Tensor:
        """Weights of the concepts [B, g]; each row sums to 1."""
        return self._images(features)[1]

    def text_attention(self, features: Mapping[str, Tensor]) -> Tensor:
        """Weights of the concepts [B, g]; each row sums to 1."""
        return self._texts(features)[1]

    def post_step(self) -> None:
        self.steps += 1
        super().post_step()

    def health(self) -> dict[str, float]:
        """Figures of the last training batch of all ranks; empty before the first step. Call it on all ranks.

        ``image_spread``, ``text_spread``: 1 - mean cosine between the concept embeddings of different samples; near 0
        they have collapsed. ``image_concepts``, ``text_concepts``: number of concepts that share a sample's attention,
        the mean of the exponential of its entropy, in [1, g]. ``score``: mean cosine of a pair's two embeddings.
        """
        if self._sums is None:
            return {}
        sums = distributed.all_sum(self._sums)
        dim = self.block_dim
        number, score, image_concepts, text_concepts = sums[2 * dim :].tolist()
        if number < 2:
            return {}
        figures = {"image_concepts": image_concepts / number, "text_concepts": text_concepts / number}
        figures["score"] = score / number
        for side, total in (("image", sums[:dim]), ("text", sums[dim : 2 * dim])):
            figures[f"{side}_spread"] = 1 - (float(total.square().sum()) - number) / (number * (number - 1))
        if int(self.steps) >= _STEPS_TO_SPREAD and distributed.rank() == 0:
            self._warn(figures)
        return figures

    def _warn(self, figures: dict[str, float]) -> None:
        """Log once that the embeddings have collapsed, and once that the attention is narrow."""
        collapsed = [side for side in ("image", "text") if figures[f"{side}_spread"] < _COLLAPSED]
        if collapsed and "spread" not in self._warned:
            self._warned.add("spread")
            log.warning(
                "concepts: after %d steps the concept embeddings of different samples still have a mean cosine of %.3f "
                "(%s): the concept level has collapsed (try concepts.norm=batch, concept_dcl.positive_weight=2, a "
                "larger concepts.scale, or more words with vectors)",
                int(self.steps), 1 - min(figures[f"{side}_spread"] for side in collapsed), " and ".join(collapsed),
            )  # fmt: skip
        shared, number = min(figures["image_concepts"], figures["text_concepts"]), len(self.vectors)
        if shared < _NARROW * number and "attention" not in self._warned:
            self._warned.add("attention")
            log.warning(
                "concepts: only %.1f of %d concepts share a sample's attention, so the concept level cannot "
                "distinguish most samples: the heads' learning rate may be too high (try --heads-lr-scale 0.1)",
                shared, number,
            )  # fmt: skip

    @torch.no_grad()
    def _measure(self, images: Tensor, texts: Tensor, image_attention: Tensor, text_attention: Tensor) -> None:
        """Keep the sums over this rank's samples from which :meth:`health` computes its figures."""
        effective = [torch.special.entr(each).sum(1).exp().sum() for each in (image_attention, text_attention)]
        number = images.new_full((), len(images))
        self._sums = torch.cat([images.sum(0), texts.sum(0), torch.stack([number, (images * texts).sum(), *effective])])

    def _image_input(self, pooled: Tensor) -> Tensor:
        return self._scale_gradient(pooled).to(self.image_weight.dtype)

    def _text_input(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.text_pool(self._scale_gradient(tokens), mask).to(self.text_weight.dtype)

    def _images(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        query = self.image_query(self._image_input(features["image_pooled"]))
        return concept_embedding(query, self.image_weight, self.concepts(), scale=self.scale)

    def _texts(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        query = self.text_query(self._text_input(features["text_tokens"], features["text_mask"]))
        return concept_embedding(query, self.text_weight, self.concepts(), scale=self.scale)

    def _scale_gradient(self, features: Tensor) -> Tensor:
        """The same values; their gradient is scaled by ``tower_gradient`` and the progress of the warm-up."""
        if not features.requires_grad or (self.tower_gradient == 1 and not self.warmup):
            return features
        factor: float | Tensor = self.tower_gradient
        if self.warmup:
            factor = factor * (self.steps / self.warmup).clamp(max=1).to(features.dtype)
        return features.detach() + factor * (features - features.detach())


def _encoder(channels: int, dim: int, norm: str) -> nn.Sequential:
    norms = [MaskedBatchNorm(dim, across_ranks=True)] if norm == "batch" else []
    return nn.Sequential(nn.Linear(channels, dim), *norms)


def _load(vocabulary: str | None) -> Vocabulary | None:
    if vocabulary is None:
        log.warning("concepts: no vocabulary: 400 random concepts without a graph (see coder-plugin concepts)")
        return None
    return scenes_vocabulary() if vocabulary == "scenes" else load_vocabulary(vocabulary)
