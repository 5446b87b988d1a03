"""Settings: environment variables, read at each call, refused with the valid values named."""

from __future__ import annotations

import os
import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxguard import _settings

namespaces = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)
spaces = st.sampled_from(["", " ", "\t", "  "])
indices = st.integers(0, 10**6).map(str)
uuids = st.uuids().map(lambda value: f"GPU-{value}")
names = st.lists(indices | uuids, min_size=1, max_size=8, unique=True)


def read(value: str) -> _settings.Devices:
    """Read JAXGUARD_DEVICES as if it were this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_settings.DEVICES, value)
        return _settings.devices()


@pytest.mark.parametrize("value", ["auto", "", "  ", " auto "])
def test_auto(value: str) -> None:
    """Empty, blank and `auto` mean: look."""
    assert read(value) == _settings.Devices(auto=True)


def test_nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without settings, devices are looked for and nothing runs inline."""
    monkeypatch.delenv(_settings.DEVICES, raising=False)
    monkeypatch.delenv(_settings.INLINE, raising=False)

    assert _settings.devices() == _settings.Devices(auto=True)
    assert _settings.inline() is False


@given(number=st.integers(1, 999_999), namespace=st.none() | namespaces, before=spaces, after=spaces)
def test_cpu_slots(number: int, namespace: str | None, before: str, after: str) -> None:
    """`cpu:N` gives N slots, `cpu:N@name` gives them in a namespace."""
    text = f"cpu:{number}" if namespace is None else f"cpu:{number}@{namespace}"

    assert read(before + text + after) == _settings.Devices(cpus=number, namespace=namespace or "")


@given(listed=names, gap=spaces)
def test_a_list_keeps_its_order(listed: list[str], gap: str) -> None:
    """Indices and UUIDs are taken as they stand, in their order; MIG slices are names like any other."""
    listed = [*listed, "MIG-GPU-8f6b/1/0"]

    assert read(f"{gap},{gap}".join(listed)) == _settings.Devices(listed=tuple(listed))


@pytest.mark.parametrize(
    "value",
    [
        *("cpu", "cpu:", "cpu:0", "cpu:-1", "cpu:two", "cpu:4@", "cpu:4@a b", "CPU:4", "cpu:4,0", "gpu:0", "0,", ",0"),
        *("0,0", "-1", "0;1", "0 1", "none", "1.5", "GPU-", "cpu:1234567", "\N{ARABIC-INDIC DIGIT THREE}"),
    ],
)
def test_what_is_not_valid_is_refused(value: str) -> None:
    """The error quotes the value and names the valid ones."""
    with pytest.raises(ValueError, match=re.escape(f"JAXGUARD_DEVICES={value!r} is not valid. Valid are: auto; cpu:N")):
        read(value)


@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Whatever stands in the variable is one of the three forms, or a ValueError."""
    try:
        found = read(text)
    except ValueError:
        return
    assert found.auto + bool(found.cpus) + bool(found.listed) == 1


@pytest.mark.parametrize(("value", "meaning"), [("", False), ("0", False), (" 1 ", True), ("1", True)])
def test_inline(monkeypatch: pytest.MonkeyPatch, value: str, meaning: bool) -> None:  # noqa: FBT001
    """1 switches inline on; 0 and empty leave it off."""
    monkeypatch.setenv(_settings.INLINE, value)

    assert _settings.inline() is meaning


@pytest.mark.parametrize("value", ["yes", "true", "2", "on"])
def test_inline_is_refused_like_the_rest(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """What is neither 0 nor 1 is refused, not guessed."""
    monkeypatch.setenv(_settings.INLINE, value)

    with pytest.raises(ValueError, match=f"JAXGUARD_INLINE={value!r} is not valid. Valid are: 1"):
        _settings.inline()


def test_a_change_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are read at each call: nothing is remembered."""
    monkeypatch.setenv(_settings.DEVICES, "cpu:3")
    assert _settings.devices().cpus == 3
    monkeypatch.setenv(_settings.DEVICES, "cpu:5")
    assert _settings.devices().cpus == 5


def test_settings_are_read_in_one_module() -> None:
    """No other module spells the name of a setting: each has one reader."""
    package = pathlib.Path(_settings.__file__).parent
    readers = {
        path.name
        for path in package.glob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if re.search(r"""(environ|getenv).*["']JAXGUARD_""", line)
    }

    assert readers <= {"_settings.py"}
    assert os.environ.get(_settings.DEVICES, "").startswith("cpu:2@"), "the test's own slots are in force"
