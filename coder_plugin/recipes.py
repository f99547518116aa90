"""The named recipes: CODER's objective, its variants, and every row of its ablation tables (METHODS 6, 11).

An objective is a function that returns a :class:`~coder_plugin.objective.Objective`; entry points give it its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from coder_plugin.objective import Objective

#: L = 3 L_DCL + L_M-DCL + L_DCL^C + L_PGC (CODER eq. 8), diversity over batch and banks.
_CODER = "3*dcl(diversity_over='batch+bank') + m_dcl + concept_dcl + pgc"

#: CODER, section 4.2, on VSE-infinity's base (METHODS 6): every caption a pair, 15 epochs at 2e-4, 15 at a tenth of it, one
#: warm-up epoch, BERT at a tenth of the rate.
_TRAINING = {
    "model": "region-bert",
    "captions": "all",
    "batch_size": 128,
    "epochs": 30,
    "lr": 2e-4,
    "lr_scheduler": "step",
    "lr_step_epochs": 15,
    "lr_step_gamma": 0.1,
    "opt": "adamw",
    "wd": 1e-4,
    "grad_clip_norm": 2.0,
    "warmup_epochs": 1.0,
    "text_lr_scale": 0.1,
    "region_dropout": 0.2,
    "word_dropout": 0.2,
}
#: What the paper says, and nothing that it does not.
_UNPRINTED = {"wd": 0.0, "grad_clip_norm": None, "warmup_epochs": 0.0, "text_lr_scale": 1.0}
_PRINTED_TRAINING = {**_TRAINING, **_UNPRINTED, "opt": "adam", "region_dropout": 0.0, "word_dropout": 0.0}


def coder() -> Objective:
    """The paper's objective with METHODS' readings; training options are the trainer's own."""
    return Objective.parse(_CODER)


def coder_printed() -> Objective:
    """The paper's letter: its formula's weight on the positive, no masking of an image's other captions, and every bank
    entry an anchor."""
    settings: dict[str, Any] = {}
    for term in ("dcl", "m_dcl", "concept_dcl"):
        settings |= {f"{term}.positive_weight": "mu", f"{term}.mask_same_image": False}
    return coder().with_options({**settings, "m_dcl.reverse": "all"})


def benchmark(*, clusters: int, printed: bool = False) -> Objective:
    """A data set's objective: its number of prototypes and the paper's training."""
    objective = (coder_printed() if printed else coder()).with_options({"prototypes.clusters": clusters})
    return _trained(objective, _PRINTED_TRAINING if printed else _TRAINING)


coder_f30k = partial(benchmark, clusters=10_000)
coder_coco = partial(benchmark, clusters=20_000)
coder_f30k_printed = partial(benchmark, clusters=10_000, printed=True)
coder_coco_printed = partial(benchmark, clusters=20_000, printed=True)


def ablation(
    text: str = _CODER, *, options: Mapping[str, Any] | None = None, training: Mapping[str, Any] | None = None
) -> Objective:
    """A table's row: the terms it has, as ``coder-f30k`` trains them."""
    given = {"prototypes.clusters": 10_000, **(options or {})} if "pgc" in text else options or {}
    return _trained(Objective.parse(text).with_options(given), {**_TRAINING, **(training or {})})


def table3(row: int) -> Objective:
    """CODER table 3: implicit diversity, explicit over the batch, explicit over batch and banks; rows 4-6 with M-DCL."""
    kind, over = (("none", "batch"), ("std", "batch"), ("std", "batch+bank"))[(row - 1) % 3]
    options = {"dcl.diversity": kind, "dcl.diversity_over": over, "concept_dcl.diversity": kind}
    if row > 3:
        return ablation(options={**options, "m_dcl.diversity": kind, "m_dcl.diversity_over": over})
    return ablation("3*dcl + concept_dcl + pgc", options=options)


def table7(kind: str) -> Objective:
    """CODER table 7: how diversity is estimated, in every term."""
    options = {f"{term}.diversity": kind for term in ("dcl", "m_dcl", "concept_dcl")}
    if kind == "none":  # nothing is averaged with the banks'
        options |= {"dcl.diversity_over": "batch", "m_dcl.diversity_over": "batch"}
    return ablation(options=options)


table2_1 = partial(ablation, "triplet")
table2_2 = partial(ablation, "3*dcl")
table2_3 = partial(ablation, "3*dcl(diversity_over='batch+bank') + m_dcl")
table2_4 = partial(ablation, "3*dcl(diversity_over='batch+bank') + m_dcl + concept_dcl")
table2_5 = ablation
table3_1, table3_2, table3_3, table3_4, table3_5, table3_6 = (partial(table3, row) for row in range(1, 7))
table4_5k, table4_10k, table4_15k, table4_20k = (
    partial(ablation, options={"prototypes.clusters": 1000 * thousands}) for thousands in (5, 10, 15, 20)
)
table7_none, table7_std, table7_entropy = (partial(table7, kind) for kind in ("none", "std", "entropy"))

_WITHOUT_M_DCL = "3*dcl(diversity_over='batch+bank') + concept_dcl + pgc"
fig3_32, fig3_64, fig3_128 = (partial(ablation, training={"batch_size": size}) for size in (32, 64, 128))
fig3_32_without, fig3_64_without, fig3_128_without = (
    partial(ablation, _WITHOUT_M_DCL, training={"batch_size": size}) for size in (32, 64, 128)
)


def fig7(epsilon: float) -> Objective:
    """CODER figure 7: epsilon of the diversity, in every term. The values are ours: the figure is not in the text."""
    return ablation(options={f"{term}.epsilon": epsilon for term in ("dcl", "m_dcl", "concept_dcl")})


fig7_001, fig7_005, fig7_01, fig7_02, fig7_05 = (partial(fig7, value) for value in (0.01, 0.05, 0.1, 0.2, 0.5))


def coder_clip() -> Objective:
    """Fine-tuning a pretrained CLIP: what is new enters slowly, and the loss keeps its scale at any batch.

    The paper's mu 0.1 and gamma 0.3 move every negative of every anchor, which rebuilds the space that InfoNCE has left and
    costs recall for epochs; mu 0.05 and gamma 0.6 move the hard ones (docs/RESULTS.md). All sums over negatives count as a
    batch of 256's, the bank speaks when it is full, and the concept head's gradient and score enter over 500 steps.
    """
    instance = {"mu": 0.05, "gamma": 0.6, "effective_negatives": 255}
    options = {
        **{f"{term}.{name}": value for term in ("dcl", "m_dcl") for name, value in instance.items()},
        "concept_dcl.effective_negatives": 255,
        "m_dcl.warmup": 4096,
        "concepts.warmup": 500,
    }
    return _trained(coder().with_options(options), {"lr": 1e-5, "wd": 0.1})


def _trained(objective: Objective, training: Mapping[str, Any]) -> Objective:
    return replace(objective, training=tuple(training.items()))
