"""Guarded studies in each kind of storage, alone and with several jobs on fewer slots."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import pathlib
import textwrap
import time
from typing import TYPE_CHECKING, Any

import optuna
import pytest

import jaxguard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMPLETE, FAIL, PRUNED = (optuna.trial.TrialState[s] for s in ("COMPLETE", "FAIL", "PRUNED"))


class Meter:
    """Counts who is inside, in a file, for processes that know nothing of each other."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        path.write_text("0 0 0")

    def _change(self, by: int) -> None:
        with self.path.open("r+") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            inside, most, entries = map(int, f.read().split())
            inside += by
            f.seek(0)
            f.truncate()
            f.write(f"{inside} {max(most, inside)} {entries + (by > 0)}")

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Be counted."""
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    def meet(self, number: int, bound: float = 20) -> None:
        """Come in and stay until `number` have been inside at once, so that slots are used side by side."""
        deadline = time.monotonic() + bound
        with self.inside():
            while self.most < number and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.03)  # time for one too many to come in and be counted

    @property
    def most(self) -> int:
        """How many were inside at once, at most. Under the lock: a writer truncates first."""
        with self.path.open() as f:
            fcntl.flock(f, fcntl.LOCK_SH)
            return int(f.read().split()[1])

    @property
    def entries(self) -> int:
        """How often somebody came in."""
        return int(self.path.read_text().split()[2])


@pytest.fixture
def meter(tmp_path: pathlib.Path) -> Meter:
    """Count how many trials run at once."""
    return Meter(tmp_path / "meter")


@pytest.fixture(params=["memory", "sqlite", "journal"])
def storage(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Callable[[], Any]]:
    """Give a function that opens the storage of this test; each call opens it anew, but for the one in memory."""
    memory = optuna.storages.InMemoryStorage()
    opened = []

    def open_it() -> optuna.storages.BaseStorage:
        if request.param == "memory":
            return memory
        if request.param == "sqlite":
            opened.append(optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db"))
            return opened[-1]
        backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
        return optuna.storages.JournalStorage(backend)

    yield open_it
    for each in opened:
        each.remove_session()
        each.engine.dispose()


def objective(trial: optuna.Trial, meter: Meter | None = None, together: int = 1) -> float:
    """Use the storage in every way, and end in each of the ways."""
    if meter is not None:
        meter.meet(together)
    x = trial.suggest_float("x", 0, 1)
    n = trial.suggest_int("n", 1, 3)
    trial.set_user_attr("twice", 2 * x)
    trial.report(x, 0)
    trial.report(x / 2, 1)
    if trial.number % 4 == 1:
        raise ArithmeticError
    if trial.number % 4 == 3:
        raise optuna.TrialPruned
    return x * n


def check(study: optuna.Study, number: int) -> None:
    """Compare each trial with what the objective does."""
    assert [t.number for t in study.trials] == list(range(number))
    for t in study.trials:
        assert t.state == {1: FAIL, 3: PRUNED}.get(t.number % 4, COMPLETE)
        assert set(t.params) == {"x", "n"}
        assert t.user_attrs["twice"] == 2 * t.params["x"]
        assert t.intermediate_values == {0: t.params["x"], 1: t.params["x"] / 2}
        if t.state == COMPLETE:
            assert t.value == t.params["x"] * t.params["n"]
    assert len({t.params["x"] for t in study.trials}) == number


def test_every_storage_records_every_trial(fresh_guard: Any, storage: Callable[[], Any]) -> None:
    """Complete, failed and pruned trials are in the storage with all that belongs to them, for a later reader too."""
    study = optuna.create_study(storage=storage(), study_name="s")
    study.optimize(fresh_guard(objective), n_trials=4, catch=(ArithmeticError,))
    check(study, 4)
    check(optuna.load_study(study_name="s", storage=storage()), 4)


@pytest.mark.parametrize("reuse", [False, True], ids=["fresh", "warm"])
def test_four_jobs_on_two_slots_do_everything_two_at_a_time(
    fresh_guard: Any,
    storage: Callable[[], Any],
    meter: Meter,
    reuse: bool,  # noqa: FBT001
) -> None:
    """More jobs than slots: every trial is done, exactly two run side by side, never a third; both slots come back."""
    study = optuna.create_study(storage=storage(), study_name="s")
    guarded = fresh_guard(objective, reuse=reuse)
    study.optimize(lambda trial: guarded(trial, meter, 2), n_trials=12, n_jobs=4, catch=(ArithmeticError,))
    check(study, 12)
    assert meter.entries == 12
    assert meter.most == 2
    # Both at once: a slot that a failed or pruned trial had kept would be missing.
    assert jaxguard.isolated_jax_worker(gpus=2, slot_timeout=20)(abs)(-1) == 1


def test_two_at_a_time_however_a_worker_starts(guard: Any, meter: Meter) -> None:
    """The same with each start way, in memory."""
    study = optuna.create_study()
    guarded = guard(objective)
    study.optimize(lambda trial: guarded(trial, meter, 2), n_trials=6, n_jobs=4, catch=(ArithmeticError,))
    check(study, 6)
    assert meter.most == 2


def test_the_meter_would_see_a_third(tmp_path: pathlib.Path) -> None:
    """The count of the tests above can fail: without a guard four jobs are seen as four."""
    meter = Meter(tmp_path / "free")
    study = optuna.create_study()
    study.optimize(lambda trial: objective(trial, meter, 4), n_trials=4, n_jobs=4, catch=(ArithmeticError,))
    assert meter.most == 4


@pytest.mark.parametrize("gpus", [1, 2])
def test_one_trial_after_the_other_counts_exactly(
    fresh_guard: Any, slots: Any, tmp_path: pathlib.Path, gpus: int
) -> None:
    """Trials that need all slots never overlap: unsafe increments of a file lose nothing."""
    slots(gpus)
    counter = tmp_path / "counter"
    counter.write_text("0")

    def increment(trial: optuna.Trial) -> float:
        for _ in range(5):
            value = int(counter.read_text())
            time.sleep(0.001)  # wide enough that an overlap loses an increment
            counter.write_text(str(value + 1))
        return trial.number

    study = optuna.create_study()
    study.optimize(fresh_guard(increment, gpus=gpus), n_trials=8, n_jobs=4)
    assert counter.read_text() == "40"


def test_a_seeded_study_is_the_same_in_every_storage(fresh_guard: Any, storage: Callable[[], Any]) -> None:
    """One job and one seed: the storage changes no trial, guarded or not."""

    def run(store: Any, function: Any) -> list[Any]:
        sampler = optuna.samplers.TPESampler(seed=2, n_startup_trials=3)
        study = optuna.create_study(storage=store, sampler=sampler)
        study.optimize(function, n_trials=6, catch=(ArithmeticError,))
        return [(t.state, t.params, t.values, t.intermediate_values) for t in study.trials]

    assert run(storage(), fresh_guard(objective)) == run(None, objective)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_heartbeats_of_a_storage_go_on(fresh_guard: Any, tmp_path: pathlib.Path) -> None:
    """A storage with a heartbeat keeps it in the parent while the worker runs."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/h.db", heartbeat_interval=1, grace_period=30)
    study = optuna.create_study(storage=storage)
    study.optimize(fresh_guard(lambda trial: trial.suggest_float("x", 0, 1)), n_trials=3)
    assert [t.state for t in study.trials] == [COMPLETE] * 3
    storage.remove_session()
    storage.engine.dispose()


def test_two_programs_share_a_study_and_the_slots(run_python: Any, tmp_path: pathlib.Path, meter: Meter) -> None:
    """Two scripts on one journal, two jobs each, two slots: all trials are done, two at a time over both programs."""
    log = tmp_path / "study.log"
    code = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
        import pathlib
        import optuna
        from jaxguard import isolated_jax_worker
        from test_storages import Meter

        meter = Meter.__new__(Meter)
        meter.path = pathlib.Path({str(meter.path)!r})

        @isolated_jax_worker
        def objective(trial):
            meter.meet(2)
            return trial.suggest_float("x", 0, 1)

        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend({str(log)!r}))
        study = optuna.create_study(storage=storage, study_name="shared", load_if_exists=True)
        study.optimize(objective, n_trials=6, n_jobs=2)
    """)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run_python, code) for _ in range(2)]:
            future.result().check()
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(log)))
    study = optuna.load_study(study_name="shared", storage=storage)
    assert [t.state for t in study.trials] == [COMPLETE] * 12
    assert len({t.params["x"] for t in study.trials}) == 12
    assert meter.entries == 12
    assert meter.most == 2
