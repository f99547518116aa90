"""A frozen teacher: the weights that training starts from, or another model."""

from __future__ import annotations

import hashlib
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coder_plugin.backbones import clip, transformers_clip
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import BackboneInfo
from coder_plugin.heads.capabilities import FollowsModel
from coder_plugin.memory.model_copy import ModelCopy, parameters_by_name, plain_name

#: Texts on which two tokenizers that differ give different ids.
_TEXTS = ["a photo of 2 Dogs, running!", "Äpfel & l'été 😀", "", "word " * 200]


class TeacherCopy(ModelCopy):
    """The teacher's towers: a copy of the model without its low-rank adapters, or another model, without heads."""

    def __init__(self) -> None:
        super().__init__(adapters=False)

    @torch.no_grad()
    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Images and ids [B, T] -> their features [B, D], L2-normalised, float32, and the logits' scale, 0-d."""
        if hasattr(self.model, "embed_image"):
            features = super().forward(image, text)
        else:
            encoded = self.model.encode_image(image), self.model.encode_text(text)
            features = F.normalize(encoded[0].float(), dim=-1), F.normalize(encoded[1].float(), dim=-1)
        return *features, self.model.logit_scale.float().exp().reshape(())

    def detach_unfrozen(self) -> None:
        """Copy the shared parameters that the model trains by now, before a step changes them."""
        trained = [path for path in self._shared if attrgetter(path)(self.model).requires_grad]
        if trained:
            self.own(trained)
            self.model.requires_grad_(False)

    def shared_with(self, model: Any) -> list[str]:
        """Names, within ``self.model``, of the parameters that are the model's own."""
        online = parameters_by_name(model, tied=True)
        named = self.model.named_parameters(remove_duplicate=False)
        return [name for name, parameter in named if parameter is online.get(plain_name(name))]


class Teacher(FollowsModel):
    """Features of the batch by a frozen teacher, in eval mode, without a gradient.

    Requires ``image`` and ``text``, the model's inputs. Provides ``coder_teacher_image_features`` and
    ``coder_teacher_text_features`` [B, E], L2-normalised, and ``coder_teacher_logit_scale`` [B], the teacher's 1 /
    temperature for each pair. The teacher is never trained, averaged or exported.

    ``base`` is copied when the model is created, and by trainers again when it is complete; low-rank adapters are left
    out. Weights that are loaded into a finished model before its first step are copied too.
    Parameters that the model does not train are shared with it, in memory and in checkpoints. Of another model a
    checkpoint holds only a checksum.

    Args:
        weights: ``base``; ``MODEL/TAG`` with an open_clip model name and a tag or a file of weights; the folder of an
            export; ``hf-hub:OWNER/NAME``; or ``transformers:OWNER/NAME`` or the folder of a CLIPModel or SiglipModel.
            Scoring heads and aggregators of an export are not used.

    Raises:
        CoderError: a model that cannot be opened, or that reads other pictures or tokens than the student.

    Example:
        >>> import torch, coder_plugin
        >>> model = coder_plugin.create_model("coder-tiny", loss="clip + distill(teacher=base)").train()
        >>> image, text = torch.rand(2, 3, 64, 64), torch.ones(2, model.context_length, dtype=torch.long)
        >>> before = model.eval().embed_image(image)
        >>> features = model.train()(image, text)["coder_teacher_image_features"]
        >>> torch.equal(features, before), features.requires_grad
        (True, False)
    """

    requires = ("image", "text")
    provides = ("coder_teacher_image_features", "coder_teacher_text_features", "coder_teacher_logit_scale")
    fixed_on_resume = {
        "digest": "the teacher's weights are not those that the run began with: distill(teacher=…) must name the same"
    }

    cacheable = True

    digest: Tensor

    def __init__(self, backbone: BackboneInfo, *, weights: str = "base") -> None:
        super().__init__()
        self.weights = weights
        #: Dimensions of the student's and of the teacher's features.
        self.dims = (backbone.embed_dim, backbone.embed_dim)
        self.copy = TeacherCopy()
        if weights != "base":
            self.register_buffer("digest", torch.zeros(32, dtype=torch.uint8))
        self._student: tuple[Any, ...] = ()  # in a tuple: the model owns this head, not the other way round
        self.register_state_dict_post_hook(Teacher._leave_out)
        self.register_load_state_dict_pre_hook(Teacher._fill_in)

    def attach(self, model: Any) -> None:
        if self.weights == "base" and not any(each is model for each in self._student):
            model.register_load_state_dict_pre_hook(_fill_from_student)  # a module sees only its part of a state dict
        self._student = (model,)
        if self.weights == "base":
            self.copy.copy_from(model)
        elif self.copy.model is None:
            teacher = open_teacher(self.weights, model)
            self.dims = (self.dims[0], clip.embed_dim(teacher))
            self.copy.model = teacher
            self.digest.copy_(_digest(teacher))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        self.copy.detach_unfrozen()
        image_features, text_features, scale = self.copy(image, text)
        return {
            "coder_teacher_image_features": image_features,
            "coder_teacher_text_features": text_features,
            "coder_teacher_logit_scale": scale.expand(len(text)),
        }

    def notes(self) -> list[str]:
        what = "the weights that training starts from" if self.weights == "base" else self.weights
        return [f"features stay near those of {what}, which costs another forward pass of both towers"]

    def _leave_out(self, state: dict[str, Any], prefix: str, _: Any) -> None:
        """After a state dict is made: leave out what need not be saved."""
        if self.weights != "base":
            for name in [name for name in state if name.startswith(f"{prefix}copy.")]:
                del state[name]
        elif self._student:
            for name in self.copy.shared_with(self._student[0]):
                state.pop(f"{prefix}copy.model.{name}", None)

    def _fill_in(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Before a state dict is loaded: own the parameters that it holds, and keep those that it leaves out."""
        start = f"{prefix}copy.model."
        if self.weights == "base":
            shared = self.copy._shared
            self.copy.own([name for name in shared if f"{start}{name}" in state])
            if not any(name.startswith(start) for name in state) and len(shared) < len(list(self.copy.model.parameters())):
                return  # the state has no teacher: load_state_dict reports the missing keys
        for name, value in self.copy.state_dict(prefix=f"{prefix}copy.").items():
            state.setdefault(name, value)


def _fill_from_student(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a model's state dict is loaded: what it leaves out of its teacher was the student's when it was saved."""
    heads = model.coder.heads.items() if hasattr(model, "coder") else ()
    for name, head in heads:
        start = f"{prefix}coder.heads.{name}.copy.model."
        if not isinstance(head, Teacher) or head.weights != "base" or not any(key.startswith(start) for key in state):
            continue
        student = {plain_name(key): value for key, value in state.items()}
        for path, _ in head.copy.model.named_parameters(remove_duplicate=False):
            value = student.get(plain_name(prefix + path))
            if value is not None and path not in head.copy._shared:
                state.setdefault(start + path, value)


def open_teacher(spec: str, student: Any) -> Any:
    """A frozen model in eval mode, on the student's device.

    Args:
        spec: as :class:`Teacher` takes it, but ``base``.
        student: of :func:`coder_plugin.create_model`; the teacher must read the same pictures and tokens.

    Raises:
        CoderError: the model cannot be opened, or reads something else; says which of the two to change.
    """
    if not hasattr(student, "visual") or not hasattr(student.visual, "preprocess_cfg"):
        raise CoderError(f"teacher {spec}: a model that reads regions can have no other teacher than base")
    location, name, tag = transformers_clip.find_location(spec), spec, None
    if location is None and Path(spec).is_dir():
        name = f"local-dir:{spec}"
    elif location is None and not spec.startswith(("hf-hub:", "local-dir:")):
        name, slash, tag = spec.partition("/")
        if not slash:
            raise CoderError(
                f"teacher {spec}: give base, an open_clip model and its tag (ViT-B-32/laion2b_s34b_b79k), the folder "
                "of an export, hf-hub:OWNER/NAME, or transformers:OWNER/NAME"
            )
    device = next(student.parameters()).device
    try:
        if location is not None:
            teacher = transformers_clip.create(location, device=device)
        else:
            teacher = clip.create_clip(name, pretrained=tag, device=device)
    except CoderError as error:
        raise CoderError(f"teacher {spec}: {error}") from error
    teacher.requires_grad_(False).eval()
    for own, other in zip(_inputs(student), _inputs(teacher), strict=True):
        if own != other:
            raise CoderError(
                f"teacher {spec}: it reads {other}, and the model {own}: both get the same batch. Take a teacher that "
                "reads what the model does"
            )
    if not torch.equal(_ids(student, student.coder_name), _ids(teacher, name)):
        raise CoderError(f"teacher {spec}: its tokenizer differs from the model's, and both get the same ids")
    return teacher


def _inputs(model: Any) -> list[str]:
    """What a model reads, a description each of the size, mean and deviation of pictures and the length of texts."""
    size, pixels = model.visual.image_size, model.visual.preprocess_cfg
    return [
        f"pictures of {[size, size] if isinstance(size, int) else list(size)} pixels",
        f"pictures normalised with mean {list(pixels['mean'])}",
        f"pictures normalised with standard deviation {list(pixels['std'])}",
        f"texts of {model.context_length} tokens",
    ]


def _ids(model: Any, name: str) -> Tensor:
    """The ids of some texts by a model's tokenizer."""
    if isinstance(model, transformers_clip.TransformersTowers):
        return model.tokenizer()(_TEXTS)
    import open_clip

    return open_clip.get_tokenizer(clip.register_config(name))(_TEXTS, context_length=model.context_length)


def _digest(model: nn.Module) -> Tensor:
    """SHA-256 of a model's weights, uint8 [32]."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
