"""Programs are watched through JAX's events: what they took, what failed, which key they have."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import optuna
import steps

from jaxguard import _programs, isolated_jax_worker

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


def test_the_last_key_counts_once() -> None:
    """What is no key is none; a key belongs to the next request of its thread and to no other."""
    watch = _programs.Watch()
    watch._hear_key("cd" * 32)
    watch._hear_key(KEY)
    watch._event(REQUEST)
    watch._duration(COMPILED, 0.1)
    watch._event(REQUEST)
    watch._duration(COMPILED, 0.1)
    watch._hear_key("../../etc/passwd")
    watch._event(REQUEST)
    watch._event(HIT)
    watch._duration(COMPILED, 0.1)
    assert [(program.key, program.hit) for program in watch.take()] == [(KEY, False), (None, False), (None, True)]


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


def test_a_listener_never_fails_a_step() -> None:
    """Whatever goes wrong in the store, JAX goes on."""
    watch = _programs.Watch()

    def fail(_: object) -> None:
        raise ZeroDivisionError

    watch.before = watch.after = fail
    watch._event(REQUEST)
    watch._duration(COMPILED, 0.1)
    assert len(watch.take()) == 1


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
    """JAX is made to log keys, and nobody sees that."""
    assert isolated_jax_worker(logged)() == 0


def test_keys_are_told_after_the_levels_have_changed(tmp_path: Any) -> None:
    """A warm worker that takes over the levels of the parent's loggers goes on hearing keys."""

    @isolated_jax_worker(reuse=True, compile_cache=str(tmp_path / "store"))
    def objective(trial: optuna.Trial) -> int:
        import jax

        jax.jit(lambda x: x * (trial.number + 2.5))(1.0)
        return os.getpid()

    study = optuna.create_study()
    study.optimize(objective, n_trials=1)
    logger = logging.getLogger("jax._src.cache_key")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        study.optimize(objective, n_trials=1)
    finally:
        logger.setLevel(before)
    assert len({trial.value for trial in study.trials}) == 1, "the same worker"
    for trial in study.trials:
        assert all(program["key"] for program in trial.user_attrs["jaxguard"]["programs"])
