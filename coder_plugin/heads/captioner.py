"""Captions generated from an image's tokens: what VSRN learns beside matching (Li et al., ICCV 2019).

Shapes: B batch, L image tokens, T text positions, H hidden, W word vectors, Y tokens of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin.functional.masked_sets import last_state, valid_first
from coder_plugin.functional.similarity import raise_precision
from coder_plugin.heads.base import BackboneInfo, Head


class Captioner(Head):
    """``coder_caption_nll`` [B]: negative log-likelihood of each text given its image, summed over its tokens.

    A GRU encodes the image's tokens after the context stage; a second one, started by the first one's last state, reads the
    text token by token, attends to the encoder's states by a two-layer perceptron, and predicts the next token. The text is
    that of the batch, so training with word dropout trains the captioner on what is left of it.

    Args:
        hidden: H. word_dim: W. dropout: of the image tokens (0.2 released) and, halved, of the decoder's input.
    """

    requires = ("image_tokens", "image_mask", "text", "text_mask")
    provides = ("coder_caption_nll",)

    def __init__(self, backbone: BackboneInfo, *, hidden: int = 512, word_dim: int = 300, dropout: float = 0.2) -> None:
        super().__init__()
        if not backbone.vocabulary:
            raise ValueError("captions are generated over the tokenizer's vocabulary, and this model does not tell its size")
        if hidden < 1 or word_dim < 1 or not 0 <= dropout < 1:
            raise ValueError(f"hidden and word_dim must be >= 1 and dropout in [0, 1), got {hidden}, {word_dim}, {dropout}")
        self.project = nn.Linear(backbone.image_tokens, hidden)
        self.encoder = nn.GRU(hidden, hidden, batch_first=True)
        self.embed = nn.Embedding(backbone.vocabulary, word_dim)
        self.attend = nn.Linear(2 * hidden, hidden)
        self.weigh = nn.Linear(hidden, 1, bias=False)
        self.decoder = nn.GRUCell(hidden + word_dim, hidden)
        self.out = nn.Linear(hidden, backbone.vocabulary)
        for linear in (self.project, self.out):
            nn.init.xavier_normal_(linear.weight)
        self.drop_tokens, self.drop_input = nn.Dropout(dropout), nn.Dropout(dropout / 2)

    def forward(self, image_tokens: Tensor, image_mask: Tensor, text: Tensor, text_mask: Tensor) -> dict[str, Tensor]:
        text = text[:, : text_mask.shape[1]]
        tokens, mask = valid_first(image_tokens.to(self.project.weight.dtype), image_mask)
        states, _ = self.encoder(self.drop_tokens(self.project(torch.where(mask[..., None], tokens, 0))))
        hidden = last_state(states, mask)
        words = self.embed(text)
        # the first layer of the attention, over [states ; hidden], in two halves: that of the states once
        of_states, of_hidden = self.attend.weight.chunk(2, dim=1)
        keys = F.linear(states, of_states, self.attend.bias)
        predicted = []
        for place in range(text.shape[1] - 1):
            scores = self.weigh(torch.tanh(keys + F.linear(hidden, of_hidden)[:, None])).squeeze(-1)
            with torch.autocast(scores.device.type, enabled=False):
                weights = raise_precision(scores).masked_fill(~mask, -torch.inf).softmax(1)
                context = (weights[:, None] @ raise_precision(states)).squeeze(1)
            hidden = self.decoder(self.drop_input(torch.cat([words[:, place], context.to(words.dtype)], 1)), hidden)
            predicted.append(hidden)
        # logits of the valid places alone: over a vocabulary of 30,000 words they are the largest thing here
        row, column = text_mask[:, 1:].nonzero(as_tuple=True)
        found = torch.stack(predicted, 1)[row, column] if predicted else hidden[:0]
        each = F.cross_entropy(raise_precision(self.out(found)), text[row, column + 1], reduction="none")
        return {"coder_caption_nll": each.new_zeros(len(text)).index_add(0, row, each)}
