"""The papers' mathematics as pure functions of tensors: the only place where a loss is written down.

The loss terms (:mod:`coder_plugin.losses`) gather a batch over all processes and call these functions. Shapes: n
anchors or pairs, q candidates, d dimensions. Masks are True where valid. Everything is computed in float32, or in
float64 for float64 inputs; half-precision inputs are raised first. Features are expected L2-normalised, so that an
inner product is a cosine, except where a function says that it normalises. Equations: docs/equations.md.
"""

from coder_plugin.functional.ascl_loss import ascl
from coder_plugin.functional.concepts import concept_embedding, concept_graph
from coder_plugin.functional.cra_loss import cra
from coder_plugin.functional.dcl_loss import dcl
from coder_plugin.functional.distill_loss import distill
from coder_plugin.functional.diversity_weights import diversity
from coder_plugin.functional.late_interaction import maxsim
from coder_plugin.functional.lca_loss import lca
from coder_plugin.functional.m_dcl_loss import m_dcl
from coder_plugin.functional.pgc_loss import pgc
from coder_plugin.functional.similarity import cosine
from coder_plugin.functional.triplet_loss import triplet

__all__ = [
    "ascl",
    "concept_embedding",
    "concept_graph",
    "cosine",
    "cra",
    "dcl",
    "distill",
    "diversity",
    "lca",
    "m_dcl",
    "maxsim",
    "pgc",
    "triplet",
]
