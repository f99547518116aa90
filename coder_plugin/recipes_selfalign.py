"""SelfAlign's named recipes: on CAMERA, on VSRN, on CLIP, and every row of its table IV (METHODS 9, 11)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from coder_plugin.objective import Objective

_CAMERA = "triplet(reduction='sum') + 0.01*view_diversity(reduction='sum')"
_VSRN = "triplet(reduction='sum') + caption"
#: L = L_base + L_LCA + L_CRA (eq. 13).
_LCA, _CRA = "lca", "cra(reduction='sum')"

#: What CAMERA and VSRN were trained with; every caption a pair.
_TRAINING = {
    "captions": "all",
    "batch_size": 128,
    "epochs": 30,
    "lr_scheduler": "step",
    "lr_step_epochs": 10,
    "lr_step_gamma": 0.1,
    "opt": "adam",
    "wd": 0.0,
    "grad_clip_norm": 2.0,
    "text_lr_scale": 1.0,
}
_OF_CAMERA = {**_TRAINING, "model": "region-bert-camera", "lr": 1e-4}
#: VSRN's words go through a layer of their own first, so that they share the regions' space (released).
_OF_VSRN: dict[str, Any] = {
    **_TRAINING,
    "model": "region-bigru-vsrn",
    "lr": 2e-4,
    "model_kwargs": ["word_projection=true", "bidirectional=false"],
}


def selfalign() -> Objective:
    """Both sub-modules, to be added to a base: ``clip + selfalign``.

    The hinge is on S_b + S_c, the score that retrieval uses, as in the authors' code: so it also trains the base of a model
    that is given no other loss. It is a mean, as the losses are that it is added to: summed over a batch of 128 it drowned
    InfoNCE and cost recall (docs/RESULTS.md). ``cra.ca_on=context`` is the paper's formula.
    """
    return Objective.parse("lca + cra(ca_on='combined')")


def benchmark(
    *terms: str, options: Mapping[str, Any] | None = None, training: Mapping[str, Any] | None = None
) -> Objective:
    """An objective as the paper trains it; what is not given is CAMERA's on Flickr30K."""
    objective = Objective.parse(" + ".join(terms)).with_options(options or {})
    return replace(objective, training=tuple({**_OF_CAMERA, **(training or {})}.items()))


camera = partial(benchmark, _CAMERA, _LCA, _CRA)
camera_coco = partial(camera, training={"epochs": 40, "lr_step_epochs": 20})
vsrn = partial(
    benchmark,
    _VSRN,
    _LCA,
    _CRA,
    training={**_OF_VSRN, "model_kwargs": [*_OF_VSRN["model_kwargs"], "batch_norm=true"]},
)
vsrn_coco = partial(benchmark, _VSRN, _LCA, _CRA, training={**_OF_VSRN, "lr_step_epochs": 15})


def clip() -> Objective:
    """InfoNCE and SelfAlign on the patches and words of a pretrained CLIP's towers; its heads begin anew, at a rate of their
    own."""
    return replace(Objective.parse("clip + selfalign"), training=(("lr", 1e-5), ("wd", 0.1), ("heads_lr_scale", 100.0)))


table4_0 = camera
table4_1 = partial(benchmark, _CAMERA, _CRA)
table4_2 = partial(benchmark, _CAMERA, _LCA)
table4_3, table4_4 = (
    partial(camera, options={"lca.direction": direction}) for direction in ("region_to_word", "dual")
)
table4_5, table4_6 = (partial(camera, options={"alignment.words": words}) for words in ("noun+adj+verb", "noun"))
table4_7 = partial(camera, options={"contexts.branches": "none"})
table4_8 = partial(camera, options={"cra.ca_on": "none"})
table4_9, table4_10 = (
    partial(camera, options={"contexts.branches": branch}) for branch in ("image_global", "text_global")
)
table4_11 = partial(benchmark, _CAMERA)
