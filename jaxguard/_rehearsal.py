"""Three steps that prove that guarded trials work here: with real workers, on the real devices, with a real program.

1. Several trials on one slot. 2. Slots added one by one, each worker's device seen from inside JAX. 3. All workers need
the same new program at once: who compiled it, and for how long the others waited.

Each step is bounded, and what fails is a finding.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import _devices, errors
from ._findings import Finding, Verdict
from ._isolated_worker import isolated_jax_worker

_TRIALS = 3
_TIMEOUT_S, _SLOT_TIMEOUT_S = 120.0, 30.0
_MEETING_S = 60.0

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


def steps(*, log_compiles: bool) -> Iterator[Finding]:
    """The findings of all three steps; a step that fails ends them, as the next ones build on it."""
    env = {"JAX_LOG_COMPILES": "1"} if log_compiles else None
    guard: Guard = isolated_jax_worker(timeout=_TIMEOUT_S, slot_timeout=_SLOT_TIMEOUT_S, env=env)
    try:
        slots = _devices.slot_count()
    except (errors.JaxguardError, ValueError):
        return  # the check of devices has said it
    todo: list[Callable[[], Finding]] = [
        functools.partial(_one_slot, guard),
        *(functools.partial(_so_many_slots, guard, count) for count in range(2, slots + 1)),
        functools.partial(_one_program, guard, slots),
    ]
    try:
        for step in todo:
            finding = step()
            yield finding
            if finding.verdict is Verdict.BAD:
                return
    except errors.SlotTimeout as error:
        yield Finding("trials", Verdict.NOTE, str(error), "others have the slots, and trials wait", "try again later")
    except Exception as error:  # noqa: BLE001 – whatever a trial dies of here, it would die of in a study
        fact = f"{type(error).__name__}: {error}"
        yield Finding("trials", Verdict.BAD, fact, "guarded trials do not work here", "see the worker's words above")


def doctors_trial() -> dict[str, Any]:
    """In a worker: the device that JAX sees."""
    import jax

    devices = jax.devices()
    value = float(jax.numpy.arange(8.0).sum())
    return {
        "pid": os.getpid(),
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "mask": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "right": value == 28.0,
    }


def meet(folder: str, count: int) -> dict[str, Any]:
    """In a worker: wait until so many are there, so that they hold their slots at the same time."""
    found = doctors_trial()
    with open(os.path.join(folder, str(os.getpid())), "w", encoding="utf-8"):
        pass
    until = time.monotonic() + _MEETING_S
    while len(os.listdir(folder)) < count and time.monotonic() < until:
        time.sleep(0.01)
    return found | {"met": len(os.listdir(folder))}


def _give_the_meeting_up(folder: str, count: int) -> None:
    """One could not come: have nobody wait for it."""
    for number in range(count):
        with open(os.path.join(folder, f"nobody {number}"), "w", encoding="utf-8"):
            pass


def compile_new(constant: float) -> None:
    """In a worker: need a program that nobody has compiled yet."""
    import jax

    def rehearsal_step(x: Any) -> Any:
        for _ in range(50):
            x = jax.numpy.tanh(x @ x) + constant
        return x.sum()

    jax.jit(rehearsal_step)(jax.numpy.ones((32, 32))).block_until_ready()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Optuna says nothing of trials that go well."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _one_slot(guard: Guard) -> Finding:
    import optuna

    pids = set()

    def objective(trial: Any) -> float:
        pids.add(guard(doctors_trial)()["pid"])
        return float(trial.suggest_float("x", 0, 1))

    began = time.monotonic()
    with _quiet():
        optuna.create_study().optimize(objective, n_trials=_TRIALS)
    took = time.monotonic() - began
    if len(pids) < _TRIALS or os.getpid() in pids:
        fact = f"{_TRIALS} trials ran in {len(pids)} processes"
        return Finding("trials", Verdict.BAD, fact, "trials are not isolated", "unset JAXGUARD_INLINE")
    return Finding(
        "trials", Verdict.OK, f"{_TRIALS} trials, one after the other, each in a process of its own, {took:.1f} s"
    )


def _so_many_slots(guard: Guard, count: int) -> Finding:
    with tempfile.TemporaryDirectory(prefix="jaxguard-doctor-") as folder:
        found = _side_by_side(guard(meet), folder, count)
    met = min(one["met"] for one in found)
    expected = _devices.usable()[0]
    wrong = [
        one for one in found if not one["right"] or (one["platform"] == "cpu") == expected.is_gpu or one["count"] != 1
    ]
    if wrong:
        one = wrong[0]
        fact = f"a worker computed on {one['count']} × {one['platform']} ({one['kind']}), mask {one['mask']!r}"
        return Finding(
            "slots", Verdict.BAD, fact, "it should have one device of its slot", "jaxguard slots; nvidia-smi -L"
        )
    masks = {one["mask"] for one in found}
    if met < count or (expected.is_gpu and len(masks) < count):
        fact = f"{met} of {count} trials ran side by side, on {len(masks)} devices"
        return Finding("slots", Verdict.BAD, fact, "others have taken the rest", "jaxguard slots, then try again")
    kind = found[0]["kind"] if expected.is_gpu else "one CPU device each"
    return Finding("slots", Verdict.OK, f"{count} trials side by side on {count} slots, as JAX sees them: {kind}")


def _one_program(guard: Guard, count: int) -> Finding:
    import optuna

    constant = secrets.randbits(20) / 2**20

    @guard
    def objective(trial: Any) -> float:
        compile_new(constant)
        return float(trial.number)

    with _quiet():
        study = optuna.create_study()
        study.optimize(objective, n_trials=max(2, count), n_jobs=max(2, count))
    rows = [
        (trial.user_attrs["jaxguard"]["pid"], row)
        for trial in study.trials
        for row in trial.user_attrs["jaxguard"]["programs"]
        if row["function"] == "rehearsal_step"
    ]
    compiled = [(pid, row) for pid, row in rows if row["compiles"]]
    waited = max((row.get("waited_s", 0.0) for _, row in rows), default=0.0)
    if len(compiled) == 1:
        pid, row = compiled[0]
        fact = (
            f"one program for {len(rows)} trials: pid {pid} compiled it in {row['compile_s']:.2f} s, the others "
            f"loaded it (longest wait {waited:.2f} s)"
        )
        return Finding("compiling", Verdict.OK, fact)
    return Finding(
        "compiling",
        Verdict.NOTE,
        f"one program was compiled {len(compiled)} times for {len(rows)} trials",
        "programs are not shared: JAX's cache is set up by hand, or the store cannot be used",
        "see the lines on store and environment above",
    )


def _side_by_side(meeting: Callable[..., Any], folder: str, count: int) -> list[Any]:
    """Have so many workers meet, each called by a thread; raise what one of them raised."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            found.append(meeting(folder, count))
        except BaseException as error:  # noqa: BLE001 – raised below, in the thread that asked
            failed.append(error)
            _give_the_meeting_up(folder, count)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found
