"""What a loss term is: a parameter-free module that names the keys it reads and returns a scalar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from coder_plugin.errors import CoderError

if TYPE_CHECKING:
    from coder_plugin.heads.base import Head


class Term(nn.Module):
    """Base of all loss terms (DESIGN, "one contract").

    A subclass takes its options as keyword-only arguments of ``__init__`` (annotated: they are checked against the
    objective), names in ``requires`` the keys it needs and in ``uses`` those it takes when they are there, and is called
    with exactly these. It returns a scalar, or a dict of ``*_loss`` scalars.

    A term owns no parameter: whatever learns lives in a head, under ``model.coder``, and is used inside the model's
    forward. State (banks, centres) lives in heads too; a term reads it through ``self.heads`` and hands new values to
    ``head.stash(...)``. ``__init__`` may set ``self.requires`` where options change what is needed.
    """

    requires: tuple[str, ...] = ("image_features", "text_features")
    uses: tuple[str, ...] = ()
    #: False where a loss cannot mask several captions of one image (the trainer then warns about them).
    masks_same_image: ClassVar[bool] = True
    #: Whether ``image_features`` may be [B, V, D], several features of an image whose greatest similarity counts.
    takes_views: ClassVar[bool] = False

    #: Each rank computes its own anchors' rows alone, instead of all ranks the whole matrix; set by ``create_loss``.
    local_loss: bool = False

    def __init__(self) -> None:
        super().__init__()
        self._heads: tuple[Mapping[str, Head]] = ({},)  # in a tuple: the model owns its heads, the loss must not

    @property
    def heads(self) -> Mapping[str, Head]:
        """The model's heads by name."""
        return self._heads[0]

    def provider(self, key: str, *needs: str) -> Any:
        """The head that provides a key, which may be somebody else's; ``needs`` are attributes it must have."""
        for name, head in self.heads.items():
            if key in head.provides:
                missing = [need for need in needs if not hasattr(head, need)]
                if missing:
                    raise CoderError(f"{type(self).__name__} needs a head with {', '.join(missing)}; {name!r} has none")
                return head
        raise CoderError(f"{type(self).__name__} reads {key!r}, which no head of this model provides")

    def bind(self, heads: Mapping[str, Head], *, local_loss: bool) -> Term:
        self._heads, self.local_loss = (heads,), local_loss
        return self

    def forward(self, *args: Any, **outputs: Any) -> Tensor | dict[str, Tensor]:
        raise NotImplementedError
