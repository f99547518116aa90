"""The text tower of the region models: a BERT-like encoder or a BiGRU, context stage, pooling (VSE-infinity, CAMERA, VSRN).

Shapes: B batch, T token positions, D joint dimension, E channels of the word embeddings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from coder_plugin.backbones.context import GatedSelfAttention
from coder_plugin.backbones.gpo import GPO
from coder_plugin.backbones.norm import MaskedBatchNorm
from coder_plugin.backbones.recurrent import GRU
from coder_plugin.backbones.region_encoder import Encoded, pool
from coder_plugin.backbones.region_options import Options
from coder_plugin.backbones.untrusted import check_folder
from coder_plugin.hub_access import loading
from coder_plugin.masked import unit_channels


class TextEncoder(nn.Module):
    """Base of both text encoders: token ids -> tokens and a pooled feature.

    Positions that are padding in the whole batch are cut before the encoder runs. Pooling ``last`` is the recurrent encoder's
    state after the last word, the mean of both directions. ``gpo_decoder`` is GPO's, for pooling ``gpo``. The ``contexts`` of
    CAMERA's stage are its attention's output, before the perceptron.

    With ``normalise_locals`` each channel of the words is divided by its norm over the text before CAMERA's stage, and these
    are the locals (released by SelfAlign's authors; CAMERA's own text encoder does not divide).
    """

    def __init__(self, options: Options, *, pad: int) -> None:
        super().__init__()
        self.pad, self.pooling, self.normalise_locals = pad, options.text_pooling, options.normalise_locals
        self.pool = GPO(decoder=options.gpo_decoder) if self.pooling == "gpo" else None
        self.context = _CameraText(options.embed_dim, heads=options.heads) if options.text_context == "camera" else None

    def words(self, text: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids [B, T] -> locals [B, T, ·], tokens [B, T, D] before the context stage, and the state after the last word
        [B, D], or None for an encoder that is not recurrent."""
        raise NotImplementedError

    @property
    def reads_forward(self) -> bool:
        """Whether a word's state depends only on earlier words; a text's start is then the same in every text."""
        return False

    def word_embedding(self) -> nn.Module:
        """The layer that looks up word embeddings."""
        raise NotImplementedError

    def forward(self, text: Tensor) -> Encoded:
        mask = self.mask(text)
        longest = int(mask.sum(1).max())
        text, mask = text[:, :longest], mask[:, :longest]
        words, tokens, last = self.words(text, mask)
        contexts = tokens
        if self.context is not None:
            if self.normalise_locals:
                words = tokens = unit_channels(tokens, mask)
            contexts, tokens = self.context(tokens, mask)
        pooled = pool(self.pooling, self.pool, tokens, mask) if last is None or self.pooling != "last" else last
        return Encoded(words, contexts, tokens, mask, pooled)

    def mask(self, text: Tensor) -> Tensor:
        """Ids [B, T] -> bool [B, T], True up to a text's last token that is not padding, and always at its start.

        A padding token that word dropout has inserted before the end counts.
        """
        positions = torch.arange(text.shape[1], device=text.device)
        return positions <= torch.where(text != self.pad, positions, 0).amax(1, keepdim=True)


class BertText(TextEncoder):
    """A transformers encoder, with a linear layer on its last hidden states, CLS and SEP included (VSE-infinity).

    Args:
        transformer: any model whose output has ``last_hidden_state``. While :attr:`frozen` it stays in eval mode and
            builds no autograd graph.
    """

    def __init__(self, options: Options, transformer: Any, *, pad: int) -> None:
        super().__init__(options, pad=pad)
        if self.pooling == "last":
            raise ValueError("text pooling 'last' needs a recurrent encoder: use gpo, mean or max with BERT")
        self.transformer = transformer
        #: True when all parameters of the transformer are locked. A momentum copy has no gradients either, but may be in
        #: training mode.
        self.frozen = False
        self.proj = nn.Linear(transformer.config.hidden_size, options.embed_dim)

    def train(self, mode: bool = True) -> BertText:
        super().train(mode)
        if self.frozen:  # no dropout: features as in evaluation
            self.transformer.eval()
        return self

    def word_embedding(self) -> nn.Module:
        return self.transformer.get_input_embeddings()

    def words(self, text: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            hidden = self.transformer(input_ids=text, attention_mask=mask.long()).last_hidden_state
        projected = self.proj(hidden.to(self.proj.weight.dtype))
        return projected, projected, None


class BiGRUText(TextEncoder):
    """Word vectors and a GRU over them: the mean of both directions (VSE-infinity), or one direction (VSRN).

    With ``word_projection`` a linear layer projects the word vectors to D; its outputs are the GRU's input and the locals.

    Args:
        words: size of the vocabulary.
    """

    def __init__(self, options: Options, *, words: int, pad: int = 0) -> None:
        super().__init__(options, pad=pad)
        self.embed = nn.Embedding(words, options.word_dim)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        self.project = nn.Linear(options.word_dim, options.embed_dim) if options.word_projection else None
        width = options.embed_dim if options.word_projection else options.word_dim
        shape = (width, options.embed_dim, options.text_layers)
        self.rnn = GRU(*shape, batch_first=True, bidirectional=options.bidirectional)

    @property
    def reads_forward(self) -> bool:
        return not self.rnn.bidirectional

    def word_embedding(self) -> nn.Module:
        return self.embed

    def words(self, text: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        vectors = self.embed(text)
        if self.project is not None:
            vectors = self.project(vectors)
        packed = pack_padded_sequence(vectors, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        output, ends = self.rnn(packed)
        states, _ = pad_packed_sequence(output, batch_first=True)
        directions = 2 if self.rnn.bidirectional else 1
        return vectors, states.unflatten(-1, (directions, -1)).mean(-2), ends[-directions:].mean(0)


class _CameraText(nn.Module):
    """CAMERA's context stage over words: gated self-attention, then a two-layer perceptron with BatchNorm, both residual.

    Words [B, T, D] -> the attention's output and the perceptron's, both [B, T, D].
    """

    def __init__(self, dim: int, *, heads: int) -> None:
        super().__init__()
        self.attention = GatedSelfAttention(dim, heads=heads)
        self.hidden, self.out, self.norm = nn.Linear(dim, dim), nn.Linear(dim, dim), MaskedBatchNorm(dim)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        attended = self.attention(tokens, mask)
        return attended, attended + self.norm(self.out(F.relu(self.hidden(attended))), mask)


def load_transformer(name: str, *, pretrained: bool = True, cache_dir: str | None = None) -> tuple[Any, Any]:
    """A transformers encoder and its tokenizer, by hub name or folder; without ``pretrained`` with random weights.

    Code that comes with the files is not run.

    Raises:
        CoderError: neither a folder nor a name that can be loaded here; a folder whose files name code.
    """
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    on_hub = not Path(name).is_dir()
    if not on_hub:
        check_folder(Path(name), encoder=True)
    options: dict[str, Any] = {"cache_dir": cache_dir, "trust_remote_code": False}
    copies = {f"the repository {name!r}": "--model-kwargs text=FOLDER"} if on_hub else {}
    with loading(f"text encoder {name!r} cannot be loaded", copies, [name]):
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        if pretrained:
            model = AutoModel.from_pretrained(name, **options)
        else:
            model = AutoModel.from_config(AutoConfig.from_pretrained(name, **options))
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # unused, and DDP refuses parameters without gradient
    return model.float(), tokenizer  # float32 for training, whatever the file's precision
