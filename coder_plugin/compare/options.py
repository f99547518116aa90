"""A plan's options as its rows train with them: those of their loss, and the images that choose."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from coder_plugin.compare.plan import Plan, Row
from coder_plugin.errors import CoderError

#: At most so many images are held out by default, and at most a sixth of the training images.
MOST_ASIDE = 1000
#: Options of a loss. Those that rows have in common are for the rows whose loss reads them.
_OF_LOSS = ("set", "concepts", "negatives", "positives", "hard_negatives", "negatives_file")


def with_options_of_loss(plan: Plan) -> Plan:
    """The plan whose rows have ``--set``, ``--concepts``, ``--hard-negatives`` and the like only where their loss reads them.

    So that ``--loss clip --loss coder --concepts FILE`` is one command. What no row's loss reads stays: training refuses it.
    """
    given = {row.name: _options_of_loss(row) for row in plan.rows if row.command is None}
    read = {each for options in given.values() for each, reads in options.items() if reads}
    rows = []
    for row in plan.rows:
        unread = [each for each, reads in given.get(row.name, {}).items() if not reads and each in read]
        options = {name: value for name, value in row.options.items() if (name, value) not in unread}
        if "set" in options:
            options["set"] = [setting for setting in options["set"] if ("set", setting) not in unread]
            if not options["set"] and unread:
                del options["set"]
        rows.append(replace(row, options=options))
    return replace(plan, rows=tuple(rows))


def _options_of_loss(row: Row) -> dict[tuple[str, Any], bool]:
    """Each option of a loss that a row has, with its value, and whether the row's loss reads it."""
    from coder_plugin.heads.base import Head
    from coder_plugin.heads.capabilities import AddsTexts, heads_having
    from coder_plugin.model import option_owners, required_heads_with
    from coder_plugin.objective import Objective
    from coder_plugin.pretrained.options import resolve_config

    if not any(name in row.options for name in _OF_LOSS):
        return {}
    config = resolve_config({name: value for name, value in row.points()[0].options.items() if name not in _OF_LOSS})
    objective = Objective.parse(config.loss.expression)
    owners = option_owners(objective)
    generates = bool(required_heads_with(objective, AddsTexts))
    takes_hard = any("hard_negatives" in term.build().supports for term in objective.terms)
    reads = {
        "concepts": bool(heads_having(required_heads_with(objective, Head), "image_attention")),
        "negatives": generates, "positives": generates, "hard_negatives": takes_hard, "negatives_file": takes_hard,
    }  # fmt: skip
    settings = {("set", each): each.partition("=")[0].rpartition(".")[0] in owners for each in row.options.get("set", ())}
    return settings | {(name, row.options[name]): has for name, has in reads.items() if name in row.options}


def with_held_aside(plan: Plan) -> Plan:
    """The plan with the number of images that are held out from training, where nothing says it.

    Raises:
        CoderError: a row's options do not go together, there are no validation data, or images cannot be drawn.
    """
    from coder_plugin.data.from_config import make_source
    from coder_plugin.pretrained.options import resolve_config
    from coder_plugin.training.prepare import make_objective

    made, drawn = [], {}
    for row in plan.rows:
        if row.command is not None:
            made.append(row)
            continue
        for point in row.points():
            config = resolve_config(point.options)
            make_objective(config)
        if plan.val_data is None and not config.data.on_scenes:
            raise CoderError("--val-data: name the images on which the rows are compared; no run trains or chooses by them")
        if config.data.val is None and not config.data.hold_aside:
            reading = replace(config.data, val=None)
            if (key := repr(reading)) not in drawn:
                source = make_source(reading, split="train")
                images = None if source is None else source.num_images
                if images is None:
                    raise CoderError(
                        f"{config.data.train} is read as a stream: hold images aside as data of their own, and name them with "
                        "--select-data"
                    )
                drawn[key] = max(1, min(MOST_ASIDE, math.ceil(images / 6)))
            row = replace(row, options={**row.options, "hold_aside": drawn[key]})
        made.append(row)
    return replace(plan, rows=tuple(made))
