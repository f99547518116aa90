"""The registry against distributions made by hand on `sys.path`; nothing here depends on what is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.registry import Plugin, list_plugins, load, names

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install("acme", {"losses": {"zz-one": "acme_mod:One"}}, acme_mod="One = 1")` makes a distribution importable."""
    before = set(sys.modules)

    def make(
        distribution: str,
        groups: dict[str, dict[str, str]],
        *,
        at: str = "site",
        info: str | None = None,
        version: str = "1.0",
        text: str | None = None,
        **modules: str,
    ) -> Path:
        site = tmp_path / at
        folder = site / (info or f"{distribution}-{version}.dist-info")
        folder.mkdir(parents=True)
        metadata = "PKG-INFO" if folder.suffix == ".egg-info" else "METADATA"
        (folder / metadata).write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        if text is None:
            lines = []
            for group, points in groups.items():
                lines += [f"[coder_plugin.{group}]", *(f"{name} = {target}" for name, target in points.items())]
            text = "\n".join(lines)
        (folder / "entry_points.txt").write_text(text)
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        registry.refresh()
        return site

    yield make
    for module in set(sys.modules) - before:
        if module.startswith("zzmod"):
            del sys.modules[module]
    registry.refresh()


def pick(name: str, group: str | None = None, *, check: bool = False) -> list[Plugin]:
    return [plugin for plugin in list_plugins(group, check=check) if plugin.name == name]


def test_listing_reads_metadata_and_loading_imports_one_module(install: Install) -> None:
    points = {"losses": {"zz-a": "zzmod_a:Box.value", "zz-b": "zzmod_b:thing"}, "heads": {"zz-h": "zzmod_b:thing"}}
    install("acme", points, version="2.5", zzmod_a="class Box:\n    value = [7]", zzmod_b="thing = 8")

    assert pick("zz-a") == [
        Plugin(group="losses", name="zz-a", distribution="acme", version="2.5", target="zzmod_a:Box.value")
    ]
    assert pick("zz-h")[0].group == "heads" and not pick("zz-h", "losses") and pick("zz-b", "losses")
    assert {"zz-a", "zz-b"} <= set(names("losses")) and "zz-h" not in names("losses")
    assert "zzmod_a" not in sys.modules and "zzmod_b" not in sys.modules

    value = load("losses", "zz-a")
    assert value is sys.modules["zzmod_a"].Box.value
    assert "zzmod_b" not in sys.modules


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=[pytest.mark.slow] * (group not in ("losses", "heads"))) for group in registry.GROUPS]
)
def test_every_group_with_and_without_its_prefix(install: Install, group: str) -> None:
    install("acme", {group: {"zz-a": "zzmod_a:thing"}}, zzmod_a=f"thing = {group!r}")
    assert load(group, "zz-a") == load(f"coder_plugin.{group}", "zz-a") == group
    assert pick("zz-a", f"coder_plugin.{group}") == pick("zz-a") == pick("zz-a", group)
    assert "zz-a" in names(f"coder_plugin.{group}")


@pytest.mark.parametrize("other", ["zzmod_a:thing", "zzmod_a:other", "zzmod_gone:thing"])
def test_two_distributions_claiming_one_name(install: Install, other: str) -> None:
    install("Zeta", {"losses": {"zz-both": "zzmod_a:thing", "zz-zeta": "zzmod_a:thing"}}, zzmod_a="thing = other = 1")
    install("acme", {"losses": {"zz-both": other}, "heads": {"zz-zeta": "zzmod_a:other"}}, version="3.1")

    with pytest.raises(CoderError, match="'zz-both' in coder_plugin.losses is claimed by 2") as caught:
        load("losses", "zz-both")
    assert "Zeta 1.0 (zzmod_a:thing)" in str(caught.value) and f"acme 3.1 ({other})" in str(caught.value)

    for check in (False, True):
        both = pick("zz-both", "losses", check=check)
        assert [plugin.distribution for plugin in both] == ["acme", "Zeta"]
        assert all("acme 3.1" in plugin.error and "Zeta 1.0" in plugin.error for plugin in both)
    assert names("losses").count("zz-both") == 1
    # neither the other name of the group, nor the same name in two groups, is touched
    assert load("losses", "zz-zeta") == load("heads", "zz-zeta") == 1
    assert [plugin.error for plugin in pick("zz-zeta")] == [None, None]


BROKEN = {
    "import": ("import zzmod_that_does_not_exist", "ModuleNotFoundError: No module named 'zzmod_that_does_not_exist'"),
    "attribute": ("other = 1", "AttributeError: module 'zzmod_bad' has no attribute 'thing'"),
    "syntax": ("def thing(:\n    pass", "SyntaxError: "),
    "raises": ("raise RuntimeError('no\\nlicence')", "RuntimeError: no licence"),
    "exits": ("import sys; sys.exit('bye')", "SystemExit: bye"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_reported_and_breaks_nothing_else(install: Install, kind: str) -> None:
    source, cause = BROKEN[kind]
    install("bad-dist", {"heads": {"zz-bad": "zzmod_bad:thing"}}, zzmod_bad=source)
    install("good", {"heads": {"zz-good": "zzmod_good:thing"}}, zzmod_good="thing = 1")

    assert pick("zz-bad")[0].error is None, "metadata cannot know"
    with pytest.raises(CoderError) as caught:
        load("heads", "zz-bad")
    message = str(caught.value)
    assert all(part in message for part in ("'zz-bad'", "coder_plugin.heads", "bad-dist 1.0", "zzmod_bad:thing", cause))
    assert type(caught.value.__cause__).__name__ == cause.split(":")[0]

    assert load("heads", "zz-good") == 1
    (bad,), (good,) = pick("zz-bad", "heads", check=True), pick("zz-good", "heads", check=True)
    assert bad.error.startswith(cause) and "\n" not in bad.error
    assert good.error is None
    assert pick("zz-bad")[0].error is None, "a check is not remembered: the fault may be put right"


def test_check_imports_every_plugin(install: Install) -> None:
    install("acme", {"heads": {"zz-a": "zzmod_a:thing"}}, zzmod_a="thing = 1")
    list_plugins("heads")
    assert "zzmod_a" not in sys.modules
    list_plugins("heads", check=True)
    assert "zzmod_a" in sys.modules


def test_a_malformed_target_is_reported(install: Install) -> None:
    install("acme", {"losses": {"zz-a": "not a target!", "zz-b": "zzmod_b:thing"}}, zzmod_b="thing = 1")
    with pytest.raises(CoderError, match="acme 1.0, cannot be loaded from not a target!"):
        load("losses", "zz-a")
    assert load("losses", "zz-b") == 1


def test_an_unreadable_file_of_an_unrelated_package(install: Install) -> None:
    """`importlib.metadata.entry_points` raises for everybody then."""
    points = {"losses": {"zz-a": "zzmod_a:thing"}, "heads": {"zz-h": "zzmod_a:thing"}}
    install("acme", points, zzmod_a="thing = 1")
    install("garbled", {}, text="[some.group]\nno equals sign here\n")
    with pytest.warns(UserWarning, match="garbled 1.0 are ignored"):
        assert load("losses", "zz-a") == 1
    assert [plugin.distribution for plugin in pick("zz-a", "losses")] == ["acme"]
    assert "zz-h" not in names("losses")


@pytest.mark.parametrize(("given", "nearest"), [("zz-tripelt", "zz-triplet"), ("ZZ-DCL", "zz-dcl")])
def test_unknown_name_lists_the_known_and_the_nearest(install: Install, given: str, nearest: str) -> None:
    install("acme", {"losses": {"zz-triplet": "zzmod_a:a", "zz-dcl": "zzmod_a:b"}})
    with pytest.raises(CoderError) as caught:
        load("losses", given)
    message = str(caught.value)
    assert repr(given) in message and "coder_plugin.losses" in message
    assert f"did you mean {nearest!r}?" in message
    assert "known: " + ", ".join(names("losses")) in message


@pytest.mark.parametrize("call", [lambda g: load(g, "x"), names, list_plugins])
@pytest.mark.parametrize("group", ["loses", "coder_plugin.loses"])
def test_unknown_group_lists_the_known_and_the_nearest(call: Callable[[str], object], group: str) -> None:
    with pytest.raises(CoderError) as caught:
        call(group)
    message = str(caught.value)
    assert "plugin group: 'loses'" in message and "did you mean 'losses'?" in message
    assert "known: losses, heads, negatives, positives, backbones, detectors, readers, regions, recipes" in message


def test_discovery_is_cached_until_refresh(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install("acme", {"losses": {"zz-a": "zzmod_a:thing"}})
    assert pick("zz-a", "losses")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(site)])
    assert pick("zz-a", "losses")
    registry.refresh()
    assert not pick("zz-a", "losses")
