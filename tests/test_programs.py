"""Programs are watched through JAX's events: what they took, what failed, which key they have."""

from __future__ import annotations

import logging
import time

import pytest
import steps

from jaxguard import _jax_state, _programs, isolated_jax_worker

REQUEST = "/jax/compilation_cache/compile_requests_use_cache"
HIT = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"
KEY = "ab" * 32


def test_waiting_is_no_compiling() -> None:
    """JAX's duration has the wait for another worker in it; what is told of the compilation has not."""
    watch = _programs.Watch()
    watch.before = lambda _: time.sleep(0.2)
    watch._event(REQUEST)
    watch._duration(COMPILED, 0.5, fun_name="jit(step)")
    (program,) = watch.take()
    assert program.function == "step"
    assert program.waited_s >= 0.2
    assert 0 < program.compile_s <= 0.3
    assert watch.take() == []


def test_a_key_is_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """What JAX is about to look for has a key; what is none is none."""
    names = iter([(f"jit_f-{KEY}", None), None, ("../../etc/passwd", None)])
    monkeypatch.setattr(_jax_state, "program_in_need", lambda: next(names))
    watch = _programs.Watch()
    for _ in range(3):
        watch._event(REQUEST)
        watch._duration(COMPILED, 0.1)
    assert [program.key for program in watch.take()] == [KEY, None, None]


def test_a_program_inside_another_one() -> None:
    """Each is told by itself."""
    watch = _programs.Watch()
    for _ in range(2):
        watch._event(REQUEST)
    watch._event(HIT)
    watch._duration(COMPILED, 0.1, fun_name="inner")
    watch._duration(COMPILED, 0.3, fun_name="outer")
    assert [(program.function, program.hit) for program in watch.take()] == [("inner", True), ("outer", False)]


def test_only_its_own_failure_is_one() -> None:
    """A program that is compiled while an exception is handled has not failed for that."""
    watch = _programs.Watch()
    try:
        int("no number")
    except ValueError:
        watch._event(REQUEST)
        watch._duration(COMPILED, 0.1)
    watch._event(REQUEST)
    try:
        int("no number")
    except ValueError:
        watch._duration(COMPILED, 0.1)
    assert [program.failed for program in watch.take()] == [False, True]


def test_a_listener_fails_no_step() -> None:
    """What may go wrong in the store fails nothing; what a signal handler raises meanwhile is the user's."""
    watch = _programs.Watch()

    def fail(_: object) -> None:
        raise ValueError

    watch.before = watch.after = fail
    watch._event(REQUEST)
    watch._duration(COMPILED, 0.1)
    assert len(watch.take()) == 1

    def by_signal(_: object) -> None:
        raise TimeoutError

    watch.before = by_signal
    with pytest.raises(TimeoutError):
        watch._event(REQUEST)


def logged() -> int:
    """Count what a handler of the user's own sees of JAX's loggers below WARNING."""
    seen: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record)

    logging.getLogger("jax").addHandler(Handler())
    steps.plain()
    return sum(record.levelno < logging.WARNING for record in seen)


def test_a_handler_of_the_users_sees_nothing_new() -> None:
    """Watching makes JAX log nothing."""
    assert isolated_jax_worker(logged)() == 0
