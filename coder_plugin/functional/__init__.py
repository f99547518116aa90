"""The papers' mathematics as pure functions of tensors.

Shapes: n anchors, q candidates, d dimensions. Masks are True where valid. Everything is computed in float32 or better:
half-precision inputs are raised first, float64 in gives float64 out. Features are expected L2-normalised, so that a
product is a cosine; only :func:`concept_embedding` normalises, as its equation does.
"""

from coder_plugin.functional.alignment import (
    Assignment,
    balance,
    check_cra_options,
    check_lca_options,
    correspondence,
    cra,
    directed_cra,
    directed_lca,
    hardest,
    lca,
    prototype_scores,
    unit_context,
)
from coder_plugin.functional.asymmetry import ascl, check_temperature, directed_ascl
from coder_plugin.functional.concepts import concept_embedding, concept_graph, pgc, pgc_of_logits
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
from coder_plugin.functional.similarity import cosine, different_images
from coder_plugin.functional.weights import Diversity, diversity, spread, spread_of_variance

__all__ = [
    "Assignment",
    "Diversity",
    "DiversityOver",
    "Reverse",
    "ascl",
    "balance",
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
    "hardest",
    "lca",
    "m_dcl",
    "pgc",
    "pgc_of_logits",
    "prototype_scores",
    "spread",
    "spread_of_variance",
    "triplet",
    "unit_context",
]
