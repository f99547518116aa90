"""The papers' mathematics as pure functions of tensors.

Shapes: n anchors, q candidates, d dimensions. Masks are True where valid. Everything is computed in float32 or better:
half-precision inputs are raised first, float64 in gives float64 out. Features are expected L2-normalised, so that a
product is a cosine; only :func:`concept_embedding` normalises, as its equation does.
"""

from coder_plugin.functional.alignment import (
    Assignment,
    check_lca_options,
    correspondence,
    directed_lca,
    lca,
    prototype_scores,
    sinkhorn_bias,
)
from coder_plugin.functional.asymmetry import ascl, check_temperature, directed_ascl
from coder_plugin.functional.concepts import concept_embedding, concept_graph, pgc, pgc_of_logits
from coder_plugin.functional.context import check_cra_options, cra, directed_cra, hardest_locals, unit_context
from coder_plugin.functional.contrast import (
    DiversityOver,
    Reverse,
    check_dcl_options,
    check_m_dcl_options,
    dcl,
    directed_dcl,
    m_dcl,
)
from coder_plugin.functional.hinge import directed_triplet, triplet
from coder_plugin.functional.similarity import cosine, different_images, unit
from coder_plugin.functional.weights import Diversity, diversity, spread, spread_of_variance

__all__ = [
    "Assignment",
    "Diversity",
    "DiversityOver",
    "Reverse",
    "ascl",
    "check_cra_options",
    "check_dcl_options",
    "check_lca_options",
    "check_m_dcl_options",
    "check_temperature",
    "concept_embedding",
    "concept_graph",
    "correspondence",
    "cosine",
    "cra",
    "dcl",
    "different_images",
    "directed_ascl",
    "directed_cra",
    "directed_dcl",
    "directed_lca",
    "directed_triplet",
    "diversity",
    "hardest_locals",
    "lca",
    "m_dcl",
    "pgc",
    "pgc_of_logits",
    "prototype_scores",
    "sinkhorn_bias",
    "spread",
    "spread_of_variance",
    "triplet",
    "unit",
    "unit_context",
]
