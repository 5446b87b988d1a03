"""The context manager: a slot first, then calls in it; what comes back; and the guard as plain data."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pickle
import signal
import threading
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optuna
import pytest

import jaxguard
from jaxguard import isolated_jax_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMPLETE, FAIL, PRUNED = (optuna.trial.TrialState[s] for s in ("COMPLETE", "FAIL", "PRUNED"))


@dataclasses.dataclass
class Outcome:
    """A result type of the user's own."""

    weights: Any
    note: str


def train(trial: optuna.Trial, epochs: int = 1) -> float:
    """Be an objective with an argument more."""
    x = trial.suggest_float("x", -1, 1)
    for epoch in range(epochs):
        trial.report(x + epoch, epoch)
    return x**2


def slot_is_free(number: int = 1, slot_timeout: float = 20) -> bool:
    """Ask from another thread, which shares no hold with this one."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            answers.append(isolated_jax_worker(gpus=number, slot_timeout=slot_timeout)(abs)(-1) == 1)
        except jaxguard.SlotTimeout:
            answers.append(False)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(60)
    assert answers, "asking for a slot hangs"
    return answers[0]


@contextlib.contextmanager
def slot_held_elsewhere() -> Iterator[Callable[[], None]]:
    """Let another thread hold a slot; calling what this yields makes it let go and returns when it is about to."""
    holding, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with isolated_jax_worker():
            holding.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(60), "no slot for the other thread"
    try:
        yield let_go.set
    finally:
        let_go.set()
        thread.join(60)


# Ask and tell


def test_ask_and_tell_in_a_slot(guard: Any) -> None:
    """A trial asked for inside the block runs in the worker, with its reports, and is told its value."""
    study = optuna.create_study()
    with guard() as worker:
        for _ in range(2):
            trial = study.ask()
            study.tell(trial, worker(train, trial, epochs=3))
    for t in study.trials:
        assert t.state == COMPLETE
        assert t.value == t.params["x"] ** 2
        assert t.intermediate_values == {e: t.params["x"] + e for e in range(3)}
        assert t.user_attrs["jaxguard"]["pid"] != os.getpid()


def test_reuse_decides_whether_each_call_is_a_new_process(guard: Any) -> None:
    """Two calls in one block: two processes with reuse=False, one with reuse=True, never this one."""
    with guard() as worker:
        pids = [worker(os.getpid) for _ in range(2)]
    assert len(set(pids)) == (1 if guard.reuse else 2)
    assert os.getpid() not in pids


def test_no_worker_outlives_its_block(guard: Any, wait_until: Any) -> None:
    """After the block its processes are gone, also when the block ends in an exception."""
    pids = []

    def block() -> None:
        with guard() as worker:
            pids.append(worker(os.getpid))
            raise LookupError

    with pytest.raises(LookupError):
        block()
    wait_until(lambda: not os.path.exists(f"/proc/{pids[0]}"), f"worker {pids[0]} to end", timeout=10)


def test_the_trial_starts_when_the_slot_is_there(slots: Any, guard: Any) -> None:
    """With the block around study.ask(), the time spent waiting for a slot is no part of the trial."""
    slots(1)
    study = optuna.create_study()
    with slot_held_elsewhere() as let_go:
        released = []
        timer = threading.Timer(0.3, lambda: (released.append(datetime.datetime.now()), let_go()))  # noqa: DTZ005 - Optuna's are naive
        timer.start()
        with guard() as worker:
            trial = study.ask()
            study.tell(trial, worker(train, trial))
        timer.join()
    assert study.trials[0].datetime_start >= released[0]


def test_the_block_holds_its_slot_between_calls(slots: Any, guard: Any) -> None:
    """The slot belongs to the block from its first line to its last, not only while a call runs."""
    slots(1)
    with guard() as worker:
        assert not slot_is_free(slot_timeout=0)
        assert worker(abs, -1) == 1
        assert not slot_is_free(slot_timeout=0)
    assert slot_is_free()


def test_a_block_that_fails_gives_its_slot_back(slots: Any, guard: Any) -> None:
    """An exception in the body passes through unchanged and leaves the slot free."""
    slots(1)

    def block() -> None:
        with guard() as worker:
            worker(abs, -1)
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        block()
    assert slot_is_free()


def test_a_block_that_gets_no_slot_does_not_run(slots: Any, guard: Any) -> None:
    """slot_timeout ends the wait with SlotTimeout before the body; the holder keeps its slot."""
    slots(1)
    entered = []
    with slot_held_elsewhere():
        with pytest.raises(jaxguard.SlotTimeout), guard(slot_timeout=0.2):
            entered.append(True)
        assert not slot_is_free(slot_timeout=0)
    assert not entered
    assert slot_is_free()


def test_a_call_that_fails_leaves_the_worker_usable(guard: Any) -> None:
    """An exception comes out of the call with its type; the next call in the block works."""
    study = optuna.create_study()

    def prune(trial: optuna.Trial) -> float:
        trial.report(5.0, 0)
        raise optuna.TrialPruned

    with guard() as worker:
        trial = study.ask()
        with pytest.raises(optuna.TrialPruned):
            worker(prune, trial)
        study.tell(trial, state=PRUNED)
        trial = study.ask()
        with pytest.raises(ZeroDivisionError):
            worker(lambda t: 1 / t.number * 0 + 1 / 0, trial)
        study.tell(trial, state=FAIL)
        trial = study.ask()
        study.tell(trial, worker(train, trial))
    assert [t.state for t in study.trials] == [PRUNED, FAIL, COMPLETE]
    assert study.trials[0].value == 5.0


def test_a_worker_that_dies_is_replaced_in_its_block(slots: Any, guard: Any) -> None:
    """A killed call raises WorkerDied; the block still holds its slot, and its next call gets a new process."""
    slots(1)
    with guard() as worker:
        with pytest.raises(jaxguard.WorkerDied):
            worker(lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert not slot_is_free(slot_timeout=0)
        assert worker(abs, -1) == 1
    assert slot_is_free()


def test_a_worker_takes_any_function_and_any_keyword(fresh_guard: Any) -> None:
    """Different functions in one block, with keywords that are also names of options."""
    with fresh_guard(reuse=True) as worker:
        assert worker(pow, 2, 5) == 32
        assert worker(lambda **k: k, function=1, self=2, timeout=3) == {"function": 1, "self": 2, "timeout": 3}
        assert worker(train, optuna.trial.FixedTrial({"x": 0.5})) == 0.25


def test_ask_with_fixed_distributions(fresh_guard: Any) -> None:
    """Parameters that ask() has suggested are there in the worker."""
    study = optuna.create_study()
    space = {"x": optuna.distributions.FloatDistribution(0, 1), "n": optuna.distributions.IntDistribution(1, 4)}
    with fresh_guard() as worker:
        trial = study.ask(space)
        study.tell(trial, worker(lambda t: t.params["x"] * t.suggest_int("n", 1, 4), trial))
    assert study.trials[0].value == study.trials[0].params["x"] * study.trials[0].params["n"]


def test_a_seeded_ask_and_tell_is_the_same_with_the_guard(guard: Any) -> None:
    """One seed: the same trials with and without the worker."""

    def run(worker: Callable[..., float]) -> list[Any]:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=4, n_startup_trials=2))
        for _ in range(4):
            trial = study.ask()
            study.tell(trial, worker(train, trial))
        return [(t.params, t.value, t.intermediate_values) for t in study.trials]

    with guard() as worker:
        guarded = run(worker)
    assert guarded == run(lambda function, trial: function(trial))


def test_four_threads_ask_and_tell_on_two_slots(guard: Any) -> None:
    """Threads that share one guard and one study do all trials and give both slots back."""
    study, a_guard, errors = optuna.create_study(), guard(), []

    def work() -> None:
        try:
            with a_guard as worker:
                trial = study.ask()
                study.tell(trial, worker(train, trial))
        except BaseException as e:  # noqa: BLE001 - a thread's errors would vanish
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert [t.state for t in study.trials] == [COMPLETE] * 4
    assert all(t.value == t.params["x"] ** 2 for t in study.trials)
    assert slot_is_free(2)


# The guard is data


def test_a_guard_at_rest_is_data() -> None:
    """A guard that was not entered compares, pickles and holds nothing: it can be a module's global."""
    a, b = isolated_jax_worker(slot_timeout=30), isolated_jax_worker(slot_timeout=30)
    assert a == b
    assert a != isolated_jax_worker(slot_timeout=31)
    again = pickle.loads(pickle.dumps(a))
    assert again == a
    with again as worker:
        assert worker(abs, -1) == 1
        assert a == again


def test_one_guard_is_entered_again_and_again(guard: Any) -> None:
    """Each entry of one guard object is a hold of its own."""
    a_guard = guard()
    pids = []
    for _ in range(2):
        with a_guard as worker:
            pids.append(worker(os.getpid))
    assert len(set(pids)) >= (1 if guard.reuse else 2)
    assert slot_is_free(2)


def test_a_guard_decorates_and_opens(fresh_guard: Any) -> None:
    """The same guard object serves as decorator and as context manager."""
    a_guard = fresh_guard()
    guarded = a_guard(pow)
    with a_guard as worker:
        assert worker(pow, 2, 3) == 8
    assert guarded(2, 4) == 16


# What comes back


def test_jax_values_come_back_as_numpy(guard: Any) -> None:
    """Arrays of every kind, however deep, arrive as NumPy of the same type, shape and content; keys as their data."""

    def make() -> dict[str, Any]:
        return {
            "array": jnp.arange(6, dtype=jnp.int32).reshape(2, 3),
            "scalar": jnp.float32(1.5),
            "half": jnp.asarray([1, 2], jnp.bfloat16),
            "bool": jnp.asarray([True, False]),
            "complex": jnp.asarray([1 + 2j], jnp.complex64),
            "empty": jnp.zeros((0, 3), jnp.uint8),
            "deep": [({"w": jnp.ones(2)},), jnp.zeros(1)],
            "key": jax.random.key(7),
            "keys": jax.random.split(jax.random.key(7), 3),
            "raw key": jax.random.PRNGKey(7),
            "own": Outcome(jnp.full(3, 2.0), "kept"),
            "numpy": np.arange(3),
            "python": (1, 2.5, "text", None),
        }

    result = guard(make)()
    assert not [k for k, v in result.items() if isinstance(v, jax.Array)]
    expected = {
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "half": np.asarray([1, 2], jnp.bfloat16),
        "bool": np.asarray([True, False]),
        "complex": np.asarray([1 + 2j], np.complex64),
        "empty": np.zeros((0, 3), np.uint8),
        "raw key": np.asarray([0, 7], np.uint32),
        "key": np.asarray([0, 7], np.uint32),
        "numpy": np.arange(3),
    }
    for name, value in expected.items():
        assert isinstance(result[name], np.ndarray)
        assert result[name].dtype == value.dtype
        np.testing.assert_array_equal(result[name], value)
    assert isinstance(result["scalar"], (np.ndarray, np.generic))
    assert result["scalar"].dtype == np.float32
    assert float(result["scalar"]) == 1.5
    assert result["keys"].shape == (3, 2)
    ((inner,), zeros) = result["deep"]
    assert type(inner["w"]) is type(zeros) is np.ndarray
    np.testing.assert_array_equal(inner["w"], np.ones(2))
    assert type(result["own"]) is Outcome
    assert type(result["own"].weights) is np.ndarray
    assert result["own"].weights.tolist() == [2, 2, 2]
    assert result["own"].note == "kept"
    assert result["python"] == (1, 2.5, "text", None)


def test_what_comes_back_can_be_written_to(guard: Any) -> None:
    """Arrays are the caller's own: writable on both ways, and a change in the worker does not change the caller's."""
    mine = np.zeros(200_000)

    def change(a: Any) -> Any:
        a += 1
        return a

    with guard() as worker:
        first = worker(change, mine)
        second = worker(change, mine)
    first += 1
    assert mine.sum() == 0
    assert (first == 2).all()
    assert (second == 1).all()
