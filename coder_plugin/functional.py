"""The losses, and MaxSim's score, as pure functions of tensors: the public list.

Each is defined beside its loss term in :mod:`coder_plugin.losses`. Shapes: n anchors or pairs, q candidates, d dimensions.
Masks are True where valid. Everything is computed in float32, or in float64 for float64 inputs; half-precision inputs are
raised first. Features are expected L2-normalised, so that an inner product is a cosine, except where a function says that it
normalises. Equations: docs/equations.md.
"""

from coder_plugin.concepts.graph import concept_embedding, concept_graph
from coder_plugin.heads.maxsim import maxsim
from coder_plugin.losses.ascl import ascl
from coder_plugin.losses.cra import cra
from coder_plugin.losses.dcl import dcl
from coder_plugin.losses.distill import distill
from coder_plugin.losses.diversity import diversity
from coder_plugin.losses.lca import lca
from coder_plugin.losses.m_dcl import m_dcl
from coder_plugin.losses.pgc import pgc
from coder_plugin.losses.triplet import triplet
from coder_plugin.tensors import cosine

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
