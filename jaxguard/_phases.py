"""What a worker does at this moment, told as it goes: to its parent, should it die, and to `jaxguard stacks`.

    starting -> reading the call -> running -> answering -> ending, or idle and the next call
                                       └ programs: loading, compiling, or waiting for who compiles

It is a record (`_records`) in a memory file that parent and worker share: what it said last outlives it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from . import _descriptors, _records

STARTING, READING, RUNNING, ANSWERING, ENDING, IDLE = (
    *("starting", "reading the call", "running", "answering", "ending", "idle"),
)
LOADING, COMPILING, WAITING = "loading", "compiling", "waiting for the compilation of"
_LATEST = float(1 << 40)
_TOLD = 8
"""How many programs are told of at most: as many threads may compile, or compile to compile."""


def word(nonce: str) -> str:
    """The word of the record of the worker of a lease."""
    return f"work-{nonce}"


_record: _records.Record | None = None
_programs: dict[int, dict[str, Any]] = {}
_turn = threading.RLock()  # a signal handler of the user's may compile


def begin(nonce: str, file: int) -> None:
    """This process is a worker: tell all in this file."""
    global _record  # noqa: PLW0603 – one per worker
    _record = _records.Record(word(nonce), {}, file)
    enter(STARTING)


def enter(phase: str) -> None:
    """The next phase begins."""
    _tell(phase=phase, since=time.time())


def program(number: int, function: str, key: str | None, doing: str) -> None:
    """A program, under a number of its own until it is done, is loaded, compiled, or waited for."""
    with _turn:
        told = {"doing": doing, "function": _records.cut(function), "key": (key or "")[:16]}
        _programs[number] = {**told, "since": time.time()}
        _tell(programs=list(_programs.values())[-_TOLD:])


def program_done(number: int) -> None:
    """It is there, or has failed."""
    with _turn:
        if _programs.pop(number, None) is not None:
            _tell(programs=list(_programs.values())[-_TOLD:])


def _tell(**facts: Any) -> None:
    if _record is not None:
        _record.tell(**facts)


def _after_fork_in_child() -> None:
    global _record, _turn
    _record, _turn = None, threading.RLock()
    _programs.clear()


_descriptors.after_fork_in_child(_after_fork_in_child)


# ---------------------------------------------------------------- for those who read it


def in_words(facts: dict[str, Any]) -> str:
    """What a worker said last that it does, such as "compiling step for 12 s"."""
    now = time.time()
    phase = str(facts.get("phase") or STARTING)
    programs = facts.get("programs")
    told = [_program_in_words(program, now) for program in programs or [] if isinstance(program, dict)]
    return ", ".join(told) if phase == RUNNING and told else phase


def since(facts: dict[str, Any]) -> float | None:
    """Since when it does that, in seconds since 1970; None where the words tell it."""
    value = facts.get("since")
    is_told = facts.get("phase") == RUNNING and bool(facts.get("programs"))
    return value if isinstance(value, float) and 0 <= value < _LATEST and not is_told else None


def _program_in_words(program: dict[str, Any], now: float) -> str:
    since = program.get("since")
    seconds = f" for {max(0.0, now - since):.1f} s" if isinstance(since, float) and 0 <= since < _LATEST else ""
    return f"{program.get('doing')} {program.get('function') or 'a program'}{seconds}"
