"""The public surface: names, signatures, commands and flags that other code and scripts use, listed in surface.txt.

A change there is a change for users. If it is intended, write the file again with ``python tests/test_api_surface.py``.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FROZEN = Path(__file__).with_name("surface.txt")
MODULES = (
    "coder_plugin",
    "coder_plugin.functional",
    "coder_plugin.backbones.base",
    "coder_plugin.data.regions.base",
    "coder_plugin.detectors.base",
    "coder_plugin.heads.base",
    "coder_plugin.heads.capabilities",
    "coder_plugin.losses.base",
    "coder_plugin.noise.base",
    "coder_plugin.registry",
    "coder_plugin.evaluation",
)
COMMANDS = ("train", "eval", "concepts", "plugins", "share", "regions extract", "regions convert")

#: Promised to users: these parameters, in this order, with these defaults. Further parameters must have a default.
PROMISED = {
    "coder_plugin": (
        "create_model(name, *, loss='dcl')",
        "create_loss(loss, *, model)",
        "list_plugins(group=None)",
        "register(group, name, target=None)",
        "Trainer(*, model, loss, train, val=None, config=None)",
    ),
    "coder_plugin.functional": (
        "diversity(similarity, negatives, *, kind='std', epsilon=0.1)",
        "dcl(image_features, text_features, *, image_ids=None, mu=0.1, gamma=0.3, epsilon=0.1, diversity='std',"
        " positive_weight=1.0, bank_diversity=None)",
        "m_dcl(image_features, text_features, image_keys, text_keys, image_bank, text_bank, *, image_ids, bank_ids,"
        " bank_valid, mu, gamma, epsilon, diversity, positive_weight, reverse='paired', diversity_over='batch+bank')",
        "concept_graph(cooccurrence, counts, *, threshold=0.3, rescale=True)",
        "concept_embedding(query, weight, concepts, *, scale=10.0)",
        "pgc(image_concepts, text_concepts, classifier, labels)",
        "ascl(similarity, noise_similarity, *, temperature, image_ids=None)",
        "lca(words, word_mask, regions, region_mask, prototypes, *, temperature=0.1, assignment='sinkhorn')",
        "cra(global_context, local_context, local_mask, *, temperature=0.7, hard_negatives=512, image_ids=None)",
        "triplet(similarity, *, margin=0.2, hardest=True, image_ids=None, reduction='mean')",
    ),
    "coder_plugin.evaluation": ("recall(similarity, image_of_text)",),
}


def surface() -> str:
    return "\n".join([*_python(), "", *_command_line(), ""])


def _python() -> Iterator[str]:
    for name in MODULES:
        module = importlib.import_module(name)
        yield f"[{name}]"
        for member in _public(module):
            value = getattr(module, member)
            if inspect.isclass(value) and not issubclass(value, BaseException):
                yield f"class {member}{_signature(value)}"
                yield from (f"    {line}" for line in _methods(value))
            elif inspect.isroutine(value):
                yield f"{member}{_signature(value)}"
            else:
                yield member
        yield ""


def _public(module: ModuleType) -> list[str]:
    """``__all__``, or else the public names that the module defines; of ``functional`` only the promised functions."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    if module.__name__ == "coder_plugin.functional":  # its other functions are for our losses
        return sorted({call.name for _, call in _promises()} & vars(module).keys())
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def _methods(cls: type) -> Iterator[str]:
    for name, value in sorted(vars(cls).items()):
        value = value.__func__ if isinstance(value, classmethod) else value
        if not name.startswith("_") and inspect.isroutine(value):
            yield f"{name}{_signature(value)}"
        elif not name.startswith("_"):
            yield name


def _signature(value: object) -> str:
    """Names, kinds and defaults; annotations may change their spelling."""
    signature = inspect.signature(value)  # type: ignore[arg-type]
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _command_line() -> Iterator[str]:
    from coder_plugin.cli import build_parser

    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    yield "[coder-plugin]"
    yield from sorted(commands.choices)
    for command in COMMANDS:
        yield from ("", f"[coder-plugin {command}]")
        subparser = parser
        for word in command.split():
            (commands,) = (action for action in subparser._actions if isinstance(action, argparse._SubParsersAction))
            subparser = commands.choices[word]
        yield from sorted(_flag(action) for action in subparser._actions)


def _flag(action: argparse.Action) -> str:
    words = [", ".join(action.option_strings) or action.dest]
    if action.nargs not in (0, None):
        words.append(str(action.nargs))
    if action.type is not None:
        words.append(getattr(action.type, "__name__", str(action.type)))
    if action.choices:
        words.append("{" + ",".join(map(str, action.choices)) + "}")
    return " ".join(words)


def test_the_surface_is_the_frozen_one() -> None:
    changes = list(
        difflib.unified_diff(
            FROZEN.read_text().splitlines(), surface().splitlines(), "surface.txt", "the code", lineterm="", n=0
        )
    )
    if changes:
        pytest.fail(
            "the public surface has changed:\n" + "\n".join(changes) + "\nIf users are meant to see that: "
            "python tests/test_api_surface.py, and say in the commit what they have to change.",
            pytrace=False,
        )


def _promises() -> list[tuple[str, ast.FunctionDef]]:
    promises = []
    for module, signatures in PROMISED.items():
        for signature in signatures:
            (call,) = ast.parse(f"def {signature}: ...").body
            assert isinstance(call, ast.FunctionDef)
            promises.append((module, call))
    return promises


@pytest.mark.parametrize(("module", "promised"), _promises(), ids=[call.name for _, call in _promises()])
def test_promised_signatures(module: str, promised: ast.FunctionDef) -> None:
    actual = inspect.signature(getattr(importlib.import_module(module), promised.name)).parameters
    positional = [name for name, parameter in actual.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    wanted = [argument.arg for argument in promised.args.args]
    assert positional[: len(wanted)] == wanted
    empty, variadic = inspect.Parameter.empty, (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = {name for name, each in actual.items() if each.default is empty and each.kind not in variadic}
    assert required <= {argument.arg for argument in (*promised.args.args, *promised.args.kwonlyargs)}
    defaults = dict(zip(wanted[::-1], promised.args.defaults[::-1], strict=False))
    for argument, default in zip(promised.args.kwonlyargs, promised.args.kw_defaults, strict=True):
        assert actual[argument.arg].kind is inspect.Parameter.KEYWORD_ONLY
        if default is not None:
            defaults[argument.arg] = default
    for name, default in defaults.items():
        assert actual[name].default == ast.literal_eval(default), name


if __name__ == "__main__":
    FROZEN.write_text(surface())
    print(f"written: {FROZEN}")
