"""Functions that need another program in every trial though only constants changed: found, and said once.

A tuned number that a step closes over is a constant of its program, so each value is another program. What the
programs of a function say but for their constants is compared: where it is the same, the constants are the reason.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from dataclasses import dataclass, field
from typing import Any

from . import _descriptors

SUSPICIOUS = 3
"""So many programs that differ in constants only, each needed by a call of its own, and it is said."""
_KEPT = 32
"""How many constants of a program are compared."""
_SHOWN = 4
_CALLS_KEPT = 15
_ARRAY = "an array"
_CONSTANT = re.compile(r"(stablehlo\.constant )dense(?:<([^>]*)>|_resource<[^>]*>)")
_NUMBER = re.compile(r"-?\d[\d.eE+-]*|true|false|0x[0-9A-F]+")

Topic = tuple[str | None, str]
"""A study and its guarded function: two studies may have functions of one name that have nothing else in common."""

logger = logging.getLogger("jaxguard")


def without_constants(module: str) -> tuple[str, list[str]]:
    """Take the constants out of a module of StableHLO: a digest of the rest, and the constants in their order.

    Large arrays are not in the text: they are told apart by nothing, and all called the same.
    """
    found = _CONSTANT.findall(module)
    constants = [value if _NUMBER.fullmatch(value) else _array(value) for _, value in found[:_KEPT]]
    rest = _CONSTANT.sub(r"\1dense<>", module)
    return hashlib.blake2b(rest.encode(errors="replace"), digest_size=8).hexdigest(), constants


def _array(value: str) -> str:
    return f"{_ARRAY} {hashlib.blake2b(value.encode(), digest_size=3).hexdigest()}" if value else _ARRAY


def differing(programs: list[list[str]]) -> list[str]:
    """The constants in which programs differ that are the same otherwise, each once."""
    found: dict[str, None] = {}
    for column in zip(*programs, strict=False):
        if len(set(column)) > 1:
            found.update(dict.fromkeys(column))
    if not found and len(programs) > 1 and any(_ARRAY in constants for constants in programs):
        return [_ARRAY]  # too large to be seen, and all else is the same
    return list(found)


def reasons(calls: list[list[dict[str, Any]]]) -> list[str]:
    """The constants that made one function need other programs in other calls, as far as they are known.

    Args:
        calls: For each call, what it tells of the programs of that function.
    """
    texts: dict[str, dict[str, list[str]]] = {}
    crowded = set()
    for programs in calls:
        keys: dict[str, set[str]] = {}
        for program in programs:
            if program.get("text"):
                texts.setdefault(program["text"], {})[program["key"]] = program["constants"]
                keys.setdefault(program["text"], set()).add(program["key"])
        crowded |= {text for text, needed in keys.items() if len(needed) > 1}  # two functions of one name
    compared = [differing(list(programs.values())) for text, programs in texts.items() if text not in crowded]
    return max(compared, key=len, default=[])


def in_words(constant: str) -> str:
    """A constant as people write it."""
    if constant.startswith(_ARRAY):
        return _ARRAY
    try:
        return constant if "." not in constant else f"{float(constant):g}"
    except ValueError:
        return constant


def describe(function: str, count: int, constants: list[str]) -> str:
    """Say it, with the cures."""
    words = list(dict.fromkeys(in_words(constant) for constant in constants))
    shown = ", ".join(words[:_SHOWN]) + (" …" if len(words) > _SHOWN else "")
    says = f"jaxguard: {function} needed {count} programs; only constants changed ({shown})."
    if words == [_ARRAY]:
        return f"{says} Pass captured arrays to it as arguments."
    if all(word.lstrip("-").isdecimal() for word in words):
        return f"{says} Pass them as arguments, unless they are lengths: each length needs a program of its own."
    return (
        f"{says} Pass them to it instead: with traced= of trial_jit, or as array arguments that are not static. With "
        "optax, which writes a learning rate with a minus sign: build the optimizer inside the step from such an "
        "argument, or use optax.inject_hyperparams."
    )


# ---------------------------------------------------------------- in the calling process


@dataclass
class _Known:
    """What calls have told of one function."""

    calls: list[list[dict[str, Any]]] = field(default_factory=list)
    """Those that brought a new program."""
    keys: set[str] = field(default_factory=set)
    said: bool = False


_functions: dict[Topic, dict[str, _Known]] = {}
_lock = threading.Lock()


def learn(topic: Topic, programs: list[dict[str, Any]]) -> None:
    """Take in which programs a call needed; warn once of a function that needs another each time."""
    by_function: dict[str, list[dict[str, Any]]] = {}
    for program in programs:
        if program.get("key"):
            by_function.setdefault(program["function"], []).append(program)
    for function, needed in by_function.items():
        with _lock:
            text = _learn(_functions.setdefault(topic, {}).setdefault(function, _Known()), function, needed)
        if text:
            logger.warning("%s", text)


def _learn(known: _Known, function: str, needed: list[dict[str, Any]]) -> str | None:
    new = {program["key"] for program in needed} - known.keys
    if known.said or not new:
        return None
    known.keys |= new
    known.calls = [*known.calls[-_CALLS_KEPT:], needed]
    if len(known.calls) < SUSPICIOUS or not (found := reasons(known.calls)):
        return None
    known.said = True
    count = len(known.keys)
    known.calls.clear()
    return describe(function, count, found)


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603 – the old one may be held by a thread that does not exist here
    _lock = threading.Lock()


_descriptors.after_fork_in_child(_after_fork_in_child)
