"""Functions that are compiled again in every trial though only constants changed: found, and said once.

A tuned number that a step closes over is a constant of its program, so each value is another program. When the
programs of one function have been different a few times, the next workers have JAX write down what it compiles: where
such texts are equal but for their constants, the constants are the reason.

Source: `jax_dump_ir_to`, a public setting of JAX that writes modules as StableHLO text.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import resource
import threading
from dataclasses import dataclass, field
from typing import Any

from . import _descriptors

SUSPICIOUS = 3
"""So many calls that each brought a new program of one function, and it is looked at."""
_LOOKS = 4
_SHOWN = 4
_ARRAY = "an array"
_ROOM_BYTES = 1 << 30
_LOCATION = re.compile(r"^#loc.*$|\bloc\((?:[^()]|\([^()]*\))*\)", re.MULTILINE)
_CONSTANT = re.compile(r"dense<([^>]*)>")
_NUMBER = re.compile(r"-?\d[\d.eE+-]*|true|false")

logger = logging.getLogger("jaxguard")


# ---------------------------------------------------------------- in the worker


def read_text(folder: str, function: str) -> tuple[str, list[str]] | None:
    """Read what JAX has written down of the last program of a function, and remove all that it has written.

    Returns:
        A text that is the same for programs that differ in constants only, as a digest; and the constants.
    """
    plain = re.sub(r"\W", "", f"{function}_compile.mlir")
    names = sorted(os.listdir(folder))
    found = [name for name in names if re.sub(r"\W", "", name).endswith(plain)]
    text = None
    if found:
        with open(os.path.join(folder, found[-1]), encoding="utf-8", errors="replace") as file:
            text = file.read()
    forget(folder)
    return None if text is None else without_constants(text)


def has_room(folder: str) -> bool:
    """Say whether there is room enough to write modules down: JAX would fail the step if there were not."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize > _ROOM_BYTES and resource.getrlimit(resource.RLIMIT_FSIZE)[0] == -1


def forget(folder: str) -> None:
    """Remove all that JAX has written down."""
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))


def without_constants(text: str) -> tuple[str, list[str]]:
    """Take the constants out of a module: a digest of the rest, and the constants in their order."""
    bare = _LOCATION.sub("", text)
    constants = [_short(constant) for constant in _CONSTANT.findall(bare)]
    return hashlib.blake2b(_CONSTANT.sub("dense<>", bare).encode(), digest_size=8).hexdigest(), constants


def _short(constant: str) -> str:
    """A number as people write it; of an array, that it is one."""
    if _NUMBER.fullmatch(constant):
        try:
            return f"{float(constant):g}"
        except ValueError:  # true, false
            return constant
    return f"{_ARRAY} ({hashlib.blake2b(constant.encode(), digest_size=3).hexdigest()})"


# ---------------------------------------------------------------- in the calling process


@dataclass
class _Known:
    """What is known of one function."""

    keys: set[str] = field(default_factory=set)
    calls: int = 0
    """How many brought a program that was not known."""
    looks: int = 0
    texts: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """For each text without its constants, the constants of each program."""
    settled: bool = False


Topic = tuple[str | None, str]
"""A study and its guarded function: two studies may have functions of one name that have nothing else in common."""

_functions: dict[Topic, dict[str, _Known]] = {}
_lock = threading.Lock()


def to_look_at(topic: Topic) -> tuple[str, ...]:
    """The functions that the next worker shall look at."""
    with _lock:
        return tuple(
            sorted(
                name
                for name, known in _functions.get(topic, {}).items()
                if known.calls >= SUSPICIOUS and known.looks < _LOOKS and not known.settled
            )
        )


def learn(topic: Topic, programs: list[dict[str, Any]]) -> None:
    """Take in which programs a call needed; warn once of a function that needs another each time."""
    in_this_call: dict[str, list[dict[str, Any]]] = {}
    for program in programs:
        if program.get("key") and program.get("function"):
            in_this_call.setdefault(program["function"], []).append(program)
    for function, needed in in_this_call.items():
        with _lock:
            text = _learn(_functions.setdefault(topic, {}).setdefault(function, _Known()), function, needed)
        if text:
            logger.warning("%s", text)


def _learn(known: _Known, function: str, needed: list[dict[str, Any]]) -> str | None:
    known.calls += not known.keys.issuperset(program["key"] for program in needed)
    known.keys.update(program["key"] for program in needed)
    looked_at = [program for program in needed if "text" in program]
    known.looks += bool(looked_at)
    for program in looked_at:
        known.texts.setdefault(program["text"], {})[program["key"]] = program["constants"]
    values = max((differing(list(programs.values())) for programs in known.texts.values()), key=len, default=[])
    if known.settled or len(values) < 2:
        return None
    known.settled = True
    return describe(function, len(known.keys), values)


def differing(programs: list[list[str]]) -> list[str]:
    """The constants in which programs differ, each once."""
    found: dict[str, None] = {}
    for column in zip(*programs, strict=False):
        if len(set(column)) > 1:
            found.update(dict.fromkeys(column))
    return list(found)


def describe(function: str, count: int, values: list[str]) -> str:
    """Say it, with the cures."""
    shown = ", ".join(values[:_SHOWN]) + (" …" if len(values) > _SHOWN else "")
    if all(value.startswith(_ARRAY) for value in values):
        return (
            f"jaxguard: {function} was compiled into {count} programs; only arrays changed that it has captured. Pass "
            "them to it as arguments."
        )
    return (
        f"jaxguard: {function} was compiled into {count} programs; only constants changed ({shown}). Pass them to it "
        "instead: with traced= of trial_jit, or as array arguments that are not static. With optax, which writes a "
        "learning rate with a minus sign: build the optimizer inside the step from such an argument, or use "
        "optax.inject_hyperparams."
    )


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603 – the old one may be held by a thread that does not exist here
    _lock = threading.Lock()


_descriptors.after_fork_in_child(_after_fork_in_child)
