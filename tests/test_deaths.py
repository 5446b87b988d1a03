"""Deaths: how a worker ended, in words."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import jaxguard
from jaxguard import _deaths, _oom

NOTHING = _oom.Counts(None, None)
WORKER = _deaths.Subject("objective", 4199, 7, ("GPU-a", "GPU-b"), "running")


def died(status: int | None, written: str = "", *, keeper_gone: bool = False) -> jaxguard.WorkerDied:
    return _deaths.died(WORKER, status, written, NOTHING, keeper_gone=keeper_gone)


def test_all_that_is_known_is_said() -> None:
    """Function, pid, trial, devices, phase, how it ended, what it wrote; and the same as fields."""
    error = died(-signal.SIGSEGV, "last words\n")
    assert str(error) == (
        "the worker of objective (pid 4199, trial 7, on GPU-a and GPU-b) ended without an answer while running: "
        "ended by SIGSEGV, a crash in native code. Its last output:\nlast words"
    )
    assert (error.pid, error.trial, error.devices, error.phase) == (4199, 7, ("GPU-a", "GPU-b"), "running")
    assert (error.signal, error.exit_code, error.output) == (signal.SIGSEGV, None, "last words")


@pytest.mark.parametrize(
    ("status", "gone", "words"),
    [
        (3, False, "it left with exit code 3"),
        (None, True, "its keeper was killed, and it with it"),
        (None, False, "it could not be started"),
        (-(signal.SIGRTMIN + 5), False, f"ended by signal {signal.SIGRTMIN + 5}"),
    ],
)
def test_other_ends(status: int | None, words: str, *, gone: bool) -> None:
    """Exit codes, a keeper's death, a fork that failed, signals without a name."""
    assert words in str(died(status, keeper_gone=gone))


XLA = "F0000 00:00:1796041403.5 7 hlo_instruction.cc:71] Check failed: shape.IsArray() is not an array"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (XLA, XLA),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "terminate called"),
        ("LLVM ERROR: out of memory", "LLVM ERROR"),
        ("Fatal Python error: Aborted", "Fatal Python error: Aborted"),
    ],
)
def test_the_line_that_says_why(line: str, said: str) -> None:
    """An abort's own line is put before all, however many stacks come after it."""
    stacks = "\n".join(f'  File "x.py", line {number} in f' for number in range(1000))
    text = str(died(-signal.SIGABRT, f"noise\n{line}\nFatal Python error: Aborted\n{stacks}"))
    assert f"It said why: {said}" in text
    assert len(text) < 5000


def test_a_crash_shows_pythons_stack(guard: Any) -> None:
    """For real: a segmentation fault in C code names the line of the function that called it."""

    def objective() -> None:
        import ctypes

        ctypes.string_at(0)

    with pytest.raises(jaxguard.WorkerDied, match="SIGSEGV, a crash in native code") as caught:
        guard(objective)()
    assert "in objective" in caught.value.output
    assert "_worker.py" not in caught.value.output


def test_xla_says_why_it_ends(fresh_guard: Any) -> None:
    """For real: XLA ends the process by itself, for a flag that it does not know."""
    guarded = fresh_guard(lambda: __import__("jax").devices(), env={"XLA_FLAGS": "--xla_no_such_flag=1"})
    with pytest.raises(jaxguard.WorkerDied) as caught:
        guarded()
    assert "It said why: F" in str(caught.value)
    assert "Unknown flag" in str(caught.value)


def test_out_of_device_memory_stays_jaxs_own_error(fresh_guard: Any) -> None:
    """No death at all: the exception that JAX raises, of its own type."""

    def objective() -> None:
        import jax

        jax.numpy.zeros((1 << 23, 1 << 23)).block_until_ready()

    import jax

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED|[Oo]ut of memory"):
        fresh_guard(objective)()
    assert fresh_guard(os.getpid)()
