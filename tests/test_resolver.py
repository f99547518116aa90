"""From an objective to its heads, with made-up losses and heads of ours, of theirs and of others."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

from coder_plugin import registry
from coder_plugin.errors import CoderError
from coder_plugin.heads.base import BackboneInfo, Head
from coder_plugin.losses.base import Term
from coder_plugin.objective import Objective
from coder_plugin.resolver import INTERMEDIATE_KEYS, OWN_DISTRIBUTION, Resolution, resolve

BACKBONE = {"image_features", "text_features", "logit_scale"}
OURS = OWN_DISTRIBUTION
Plug = Callable[..., None]


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Plug:
    """`plug("heads", name=Class)` adds plugins to a registry that holds no others."""
    module = type(sys)("zzmod_resolver")
    monkeypatch.setitem(sys.modules, "zzmod_resolver", module)
    for group in ("losses", "heads", "recipes"):
        monkeypatch.setitem(registry._cache, group, ())

    def add(group: str, distribution: str = OURS, **members: Any) -> None:
        for name, member in members.items():
            setattr(module, f"{group}_{name}", member)
            if distribution == registry.REGISTERED:
                monkeypatch.setitem(registry._registered, (group, name), member)
            plugin = registry.Plugin(
                group=group,
                name=name,
                distribution=distribution,
                version="1",
                target=f"zzmod_resolver:{group}_{name}",
            )
            registry._cache[group] = (*registry._cache[group], plugin)

    return add


def head(
    requires: str = "", provides: str = "", feature_keys: tuple[str, str] | None = None, optional: str = ""
) -> type[Head]:
    """A head class that no resolver may instantiate."""

    def made(self: Head, backbone: BackboneInfo) -> None:
        raise AssertionError("resolving must not build heads")

    requires, provides, optional = (tuple(keys.split()) for keys in (requires, provides, optional))
    fields = {"requires": requires, "provides": provides, "optional": optional, "feature_keys": feature_keys}
    return type("Fake", (Head,), {**fields, "__init__": made})


def loss(requires: str = "", optional: str = "") -> type[Term]:
    return type("Fake", (Term,), {"requires": tuple(requires.split()), "optional": tuple(optional.split())})


def run(text: str, available: set[str] = BACKBONE) -> Resolution:
    return resolve(Objective.parse(text), available)


def refused(text: str, available: set[str] = BACKBONE) -> str:
    with pytest.raises(CoderError) as caught:
        run(text, available)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_ours_as_they_stand() -> None:
    clip = run("clip")
    required = {"image_features", "text_features", "logit_scale"}
    assert clip.heads == () and clip.required == required and required < clip.reads
    dcl = run("dcl")
    assert dcl.heads == ("ids",)
    assert dcl.bindings == ({key: key for key in ("image_features", "text_features", "coder_ids")},)
    assert dcl.reads == {"image_features", "text_features", "coder_ids", "image_id"}
    assert "logit_scale" in run("dcl + clip").reads


def test_nothing_is_built_that_nobody_needs(plug: Plug) -> None:
    plug("heads", one=head(provides="coder_one"), two=head(provides="coder_two"), all=head(provides="coder_a coder_b"))
    plug("losses", plain=loss("image_features"), first=loss("coder_one"))
    assert run("plain").heads == ()
    assert run("first").heads == ("one",)
    assert run("plain + first + 2*first").heads == ("one",)


def test_providers_come_before_their_readers(plug: Plug) -> None:
    plug(
        "heads",
        a_last=head("coder_mid coder_base image_features", "coder_top"),
        b_mid=head("coder_base", "coder_mid"),
        c_base=head("image_tokens text_mask", "coder_base"),
        unused=head("coder_top", "coder_more"),
    )
    plug("losses", top=loss("coder_top text_features"), mid=loss("coder_mid"))
    result = run("top + mid")
    assert result.heads == ("c_base", "b_mid", "a_last")
    assert run("mid + top").heads == ("c_base", "b_mid", "a_last")
    assert run("mid").heads == ("c_base", "b_mid")
    assert result.reads == {
        *("coder_top", "coder_mid", "coder_base", "image_features", "text_features", "image_tokens", "text_mask")
    }
    assert result.reads & INTERMEDIATE_KEYS and not run("mid").reads & {"image_features"}
    assert result.bindings == ({"coder_top": "coder_top", "text_features": "text_features"}, {"coder_mid": "coder_mid"})


def test_a_circle_is_told(plug: Plug) -> None:
    plug(
        "heads",
        one=head("coder_three", "coder_one"),
        two=head("coder_one", "coder_two"),
        three=head("coder_two", "coder_three"),
        self=head("coder_self", "coder_self"),
    )
    plug("losses", three=loss("coder_three"), self=loss("coder_self"))
    assert refused("three") == "heads require each other: three -> two -> one -> three"
    assert refused("self") == "heads require each other: self -> self"


def test_nobody_provides(plug: Plug) -> None:
    plug("heads", one=head("coder_gone", "coder_one"))
    plug("losses", direct=loss("coder_gone"), through=loss("coder_one"))
    assert refused("direct").startswith("loss 'direct' requires 'coder_gone', which neither")
    assert refused("through").startswith("head 'one' (for loss 'through') requires 'coder_gone', which neither")


def test_a_misspelled_key_and_an_input_are_told_with_the_keys_that_exist(plug: Plug) -> None:
    plug("heads", one=head(provides="coder_one"))
    plug("losses", slip=loss("text_feature"), ids=loss("image_id"), inside=loss("image_tokens"), near=loss("coder_ono"))
    there = "this model returns image_features, logit_scale, text_features; heads provide coder_one"
    assert "any head provides; did you mean 'text_features'? pass a head of yours to create_model(" in refused("slip")
    assert refused("slip").endswith("or register it") and "did you mean 'coder_one'?" in refused("near")
    assert refused("ids") == (
        f"loss 'ids' requires 'image_id', which only heads can read: the ids of the images are 'coder_ids'; {there}"
    )
    assert refused("inside") == f"loss 'inside' requires 'image_tokens', which only heads can read: {there}"
    assert run("inside", BACKBONE | {"image_tokens"}).heads == ()


def test_two_providers(plug: Plug) -> None:
    plug("heads", "theirs", one=head(provides="coder_key"))
    plug("heads", "others", two=head(provides="coder_key coder_more"))
    plug("losses", key=loss("coder_key"), more=loss("coder_more"))
    assert refused("key") == "loss 'key': 'coder_key' is provided by the heads one, two; choose with head=NAME"
    assert run("key(head=one)").heads == ("one",)
    assert run("key(head=two)").heads == ("two",)
    assert run("more").heads == ("two",)


def test_our_own_head_is_preferred(plug: Plug) -> None:
    """Installing somebody's package must not change what an objective means."""
    plug("heads", "theirs", aaa=head(provides="coder_key"))
    plug("losses", key=loss("coder_key"), maybe=loss("image_features", "coder_key"))
    assert run("key").heads == ("aaa",)
    plug("heads", OURS, zzz=head(provides="coder_key"))
    assert run("key").heads == run("maybe").heads == ("zzz",)
    assert run("key(head=aaa)").heads == ("aaa",)
    plug("heads", OURS, yyy=head(provides="coder_key"))
    assert "provided by the heads zzz, yyy; choose with head=NAME" in refused("key")


def test_two_heads_of_one_key_cannot_both_be_read(plug: Plug) -> None:
    """The later would overwrite the earlier one's key, and both terms would read it."""
    plug("heads", one=head(provides="coder_key"), two=head(provides="coder_more coder_key"))
    plug("losses", key=loss("coder_key"), more=loss("coder_more"))
    message = refused("key(head=one) + key(head=two)")
    assert message.startswith("the heads 'one' and 'two' both provide 'coder_key'") and "head=NAME" in message
    assert "both provide" in refused("key(head=one) + more")
    assert run("key(head=two) + more").heads == ("two",)


# Keys that may be absent


def test_an_optional_key(plug: Plug) -> None:
    plug("losses", maybe=loss("image_features", "coder_key logit_scale"))
    assert run("maybe").heads == ()
    assert run("maybe").bindings == ({key: key for key in ("image_features", "coder_key", "logit_scale")},)
    assert run("maybe").reads == {"image_features", "coder_key", "logit_scale"}
    plug("heads", key=head(provides="coder_key"))
    assert run("maybe").heads == ("key",)


# term@head


def test_at_reads_the_heads_pair(plug: Plug) -> None:
    plug("heads", own=head("image_features", "coder_x coder_y", ("coder_x", "coder_y")), bare=head(provides="coder_z"))
    plug(
        "losses",
        both=loss("image_features text_features logit_scale"),
        images=loss("image_features", "coder_w"),
        neither=loss("coder_z"),
    )
    result = run("both@own + both")
    assert result.heads == ("own",)
    assert result.bindings == (
        {"image_features": "coder_x", "text_features": "coder_y", "logit_scale": "logit_scale"},
        {"image_features": "image_features", "text_features": "text_features", "logit_scale": "logit_scale"},
    )
    assert result.reads == {"coder_x", "coder_y", "image_features", "text_features", "logit_scale"}
    assert run("images@own").bindings == ({"image_features": "coder_x", "coder_w": "coder_w"},)
    assert refused("both@bare") == "both@bare: head 'bare' has no features of its own to compare"
    assert refused("neither@own").startswith("neither@own: 'neither' compares no features")


# Other people's faults


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("gone", "AttributeError"),
        (type("NoHead", (), {}), "'requires' must be a tuple of keys, got None"),
        (type("Slip", (Head,), {"provides": "coder_key"}), "'provides' must be a tuple of keys, got 'coder_key'"),
        (type("Slip", (Head,), {"provides": (1,)}), "'provides' must be a tuple of keys, got (1,)"),
        (len, "'requires' must be a tuple of keys, got None"),
    ],
    ids=["does not load", "no head at all", "a string for a tuple", "no strings", "a function"],
)
def test_a_broken_head_is_reported_and_breaks_nothing_else(
    plug: Plug, caplog: pytest.LogCaptureFixture, broken: Any, said: str
) -> None:
    plug("heads", "theirs", bad=broken)
    if broken == "gone":
        delattr(sys.modules["zzmod_resolver"], "heads_bad")
    plug("heads", good=head(provides="coder_key"))
    plug("losses", key=loss("coder_key"), plain=loss("image_features"))
    with caplog.at_level(logging.WARNING):
        assert run("key").heads == ("good",)
    (warning,) = {record.getMessage() for record in caplog.records}
    assert warning.startswith("head left out: ") and "'bad'" in warning and said in warning
    assert said in refused("key(head=bad)")

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert run("plain").heads == ()
    assert not caplog.records, "who needs no head looks at none"
