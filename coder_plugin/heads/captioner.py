"""Caption generation from an image's tokens, VSRN's second objective (Li et al., ICCV 2019).

Shapes: B batch, L image tokens, T text positions, H hidden, W word vectors, Y tokens of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin.backbones.recurrent import GRU, GRUCell
from coder_plugin.heads.base import BackboneInfo, Head
from coder_plugin.masked import last_state, valid_first
from coder_plugin.tensors import upcast


class Captioner(Head):
    """Negative log-likelihood of each text given its image, summed over its tokens.

    Requires ``image_tokens`` [B, L, C] with bool ``image_mask`` [B, L], and ``text`` [B, T] with bool ``text_mask``
    [B, T'], T' <= T. Provides ``coder_caption_nll`` [B].

    A GRU encodes the image's tokens after the context stage. A second GRU starts from its last state, reads the text
    token by token, attends to the encoder's states by a two-layer perceptron, and predicts the next token. With word
    dropout the text is the caption after word dropout.

    Args:
        hidden: H, >= 1. word_dim: W, >= 1.
        dropout: rate for the projected image tokens and the decoder's input, in [0, 1); 0.2 in the authors' code.

    Raises:
        ValueError: options out of range, or a backbone that does not report the size of its vocabulary.

    Example:
        >>> sizes = BackboneInfo(embed_dim=4, image_tokens=4, vocabulary=9)
        >>> head = Captioner(sizes, hidden=5, word_dim=3)
        >>> mask = torch.ones(2, 6, dtype=torch.bool)
        >>> head(torch.randn(2, 6, 4), mask, torch.ones(2, 6, dtype=torch.int64), mask)["coder_caption_nll"].shape
        torch.Size([2])
    """

    requires = ("image_tokens", "image_mask", "text", "text_mask")
    provides = ("coder_caption_nll",)

    def __init__(self, backbone: BackboneInfo, *, hidden: int = 512, word_dim: int = 300, dropout: float = 0.2) -> None:
        super().__init__()
        if not backbone.vocabulary:
            raise ValueError("captions are predicted over the vocabulary, and this model does not report its size")
        if hidden < 1 or word_dim < 1 or not 0 <= dropout < 1:
            raise ValueError(
                f"hidden and word_dim must be >= 1 and dropout in [0, 1), got {hidden}, {word_dim}, {dropout}"
            )
        self.project = nn.Linear(backbone.image_tokens, hidden)
        self.encoder = GRU(hidden, hidden, batch_first=True)
        self.embed = nn.Embedding(backbone.vocabulary, word_dim)
        self.attend = nn.Linear(2 * hidden, hidden)
        self.weigh = nn.Linear(hidden, 1, bias=False)
        self.decoder = GRUCell(hidden + word_dim, hidden)
        self.out = nn.Linear(hidden, backbone.vocabulary)
        for linear in (self.project, self.out):
            nn.init.xavier_normal_(linear.weight)
        self.dropout = nn.Dropout(dropout)

    def forward(self, image_tokens: Tensor, image_mask: Tensor, text: Tensor, text_mask: Tensor) -> dict[str, Tensor]:
        text = text[:, : text_mask.shape[1]]
        tokens, mask = valid_first(image_tokens.to(self.project.weight.dtype), image_mask)
        states, _ = self.encoder(self.dropout(self.project(torch.where(mask[..., None], tokens, 0))))
        hidden = last_state(states, mask)
        words = self.embed(text)
        # the attention's first layer, over [states ; hidden], is split: the half for the states is computed once
        states_weight, hidden_weight = self.attend.weight.chunk(2, dim=1)
        keys = F.linear(states, states_weight, self.attend.bias)
        predicted = []
        for position in range(text.shape[1] - 1):
            scores = self.weigh(torch.tanh(keys + F.linear(hidden, hidden_weight)[:, None])).squeeze(-1)
            with torch.autocast(scores.device.type, enabled=False):
                weights = upcast(scores).masked_fill(~mask, -torch.inf).softmax(1)
                context = (weights[:, None] @ upcast(states)).squeeze(1)
            hidden = self.decoder(self.dropout(torch.cat([words[:, position], context.to(words.dtype)], 1)), hidden)
            predicted.append(hidden)
        # logits of valid positions only: with 30,000 words they are the largest tensor here
        row, column = text_mask[:, 1:].nonzero(as_tuple=True)
        selected = torch.stack(predicted, 1)[row, column] if predicted else hidden[:0]
        losses = F.cross_entropy(upcast(self.out(selected)), text[row, column + 1], reduction="none")
        return {"coder_caption_nll": losses.new_zeros(len(text)).index_add(0, row, losses)}
