"""More jobs than slots, in each of joblib's backends: all done, right, and never too many at once."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import jax
import pytest
from guarded import cube, end_with, fail_on_three, increment, jax_mean, unsafe_increment, warm_cube, warm_increment
from joblib import Parallel, delayed

import jaxguard
from jaxguard import isolated_jax_worker, slot_count

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

# joblib's multiprocessing backend forks this process, in which threads may run; its children only call the guard.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

backends = pytest.mark.parametrize("backend", ["loky", "threading", "multiprocessing"])
reuses = pytest.mark.parametrize("reuse", [False, True], ids=["fresh", "warm"])


@pytest.fixture(autouse=True)
def no_idle_pool() -> Iterator[None]:
    """End joblib's pool before and after each test: its processes keep the environment, and so the slots, of theirs."""
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor(reuse=True).shutdown(wait=True)
    yield
    get_reusable_executor(reuse=True).shutdown(wait=True)


def careful(code: int) -> str:
    """Catch what the guard raises where it raises it."""
    try:
        end_with(code)
    except jaxguard.WorkerDied as e:
        return type(e).__name__
    return "nothing"


def increments(counter: pathlib.Path, times: int, guarded: Any) -> int:
    """Be one job that calls a guarded function many times."""
    for _ in range(times):
        guarded(counter)
    return times


def all_slots_are_free(number: int) -> bool:
    return isolated_jax_worker(gpus=number, slot_timeout=30)(abs)(-1) == 1


@backends
@reuses
def test_eight_jobs_on_two_slots_do_all_the_work(backend: str, reuse: bool) -> None:  # noqa: FBT001
    """Parallel(n_jobs=8) over a guarded function gives every result in order, and frees the slots."""
    guarded = warm_cube if reuse else cube
    results = Parallel(n_jobs=8, backend=backend)(delayed(guarded)(x) for x in range(16))
    assert [value for value, _ in results] == [x**3 for x in range(16)]
    pids = {pid for _, pid in results}
    assert os.getpid() not in pids
    if not reuse:
        assert len(pids) == 16
    assert all_slots_are_free(2)


@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_a_function_guarded_on_the_spot_travels_too(fresh_guard: Any, backend: str) -> None:
    """A lambda guarded inside a function works in joblib's processes too, where cloudpickle carries it."""
    power = 3
    guarded = fresh_guard(lambda x: x**power)
    assert Parallel(n_jobs=2, backend=backend)(delayed(guarded)(x) for x in range(3)) == [0, 1, 8]


def test_every_start_way_serves_threads(guard: Any) -> None:
    """Eight threads on two slots, forked or by exec, fresh or warm."""
    guarded = guard(lambda x: (x**3, os.getpid()), slot_timeout=120)
    results = Parallel(n_jobs=8, backend="threading")(delayed(guarded)(x) for x in range(6))
    assert [value for value, _ in results] == [x**3 for x in range(6)]
    if not guard.reuse:
        assert len({pid for _, pid in results}) == 6
    assert all_slots_are_free(2)


@pytest.mark.parametrize("way", ["fork", "exec"])
def test_every_start_way_serves_processes(fresh_guard: Any, way: str) -> None:
    """joblib's own processes guard by fork and by exec."""
    env = {"OMP_DYNAMIC": "FALSE"} if way == "exec" else None
    guarded = fresh_guard(lambda x: (x**3, os.environ.get("OMP_DYNAMIC")), env=env)
    results = Parallel(n_jobs=2, backend="loky")(delayed(guarded)(x) for x in range(3))
    assert results == [(x**3, "FALSE" if way == "exec" else os.environ.get("OMP_DYNAMIC")) for x in range(3)]


@backends
def test_jax_results_arrive_as_numbers(backend: str) -> None:
    """Parallel returns NumPy where the guarded function returned JAX."""
    results = Parallel(n_jobs=slot_count(), backend=backend)(delayed(jax_mean)(x) for x in range(3))
    assert [float(r) for r in results] == [0, 0.5, 1]
    assert not [r for r in results if isinstance(r, jax.Array)]


@backends
@reuses
def test_four_jobs_on_one_slot_exclude_each_other(
    slots: Any,
    tmp_path: pathlib.Path,
    backend: str,
    reuse: bool,  # noqa: FBT001
) -> None:
    """Four jobs times 12 unsafe increments under one slot make 48: no two were inside at once, nobody was left out."""
    slots(1)
    counter = tmp_path / "counter"
    counter.write_text("0")
    guarded = warm_increment if reuse else increment
    done = Parallel(n_jobs=4, backend=backend)(delayed(increments)(counter, 12, guarded) for _ in range(4))
    assert done == [12] * 4
    assert counter.read_text() == "48"
    assert all_slots_are_free(1)


def test_the_arithmetic_would_show_an_overlap(tmp_path: pathlib.Path) -> None:
    """The count above can fail: four jobs without a guard lose increments."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    Parallel(n_jobs=4, backend="threading")(delayed(increments)(counter, 50, unsafe_increment) for _ in range(4))
    assert counter.read_text() != "200"  # less, or figures of two writers in one number


def test_threads_and_processes_exclude_each_other(slots: Any, tmp_path: pathlib.Path) -> None:
    """Threads of this process and joblib's processes stand in one line for one slot."""
    slots(1)
    counter = tmp_path / "counter"
    counter.write_text("0")
    done: list[int] = []
    threads = [threading.Thread(target=lambda: done.append(increments(counter, 15, increment))) for _ in range(2)]
    for thread in threads:
        thread.start()
    done += Parallel(n_jobs=2, backend="loky")(delayed(increments)(counter, 15, increment) for _ in range(2))
    for thread in threads:
        thread.join(120)
    assert done == [15] * 4
    assert counter.read_text() == "60"


@backends
def test_a_failing_call_raises_its_own_type_and_frees_its_slot(slots: Any, backend: str) -> None:
    """Parallel raises what the guarded function raised; the only slot is free again, also for the next Parallel."""
    slots(1)
    with pytest.raises(LookupError, match="three"):
        Parallel(n_jobs=2, backend=backend)(delayed(fail_on_three)(x) for x in range(6))
    assert all_slots_are_free(1)
    assert Parallel(n_jobs=2, backend=backend)(delayed(fail_on_three)(x) for x in (4, 5)) == [4, 5]


@backends
def test_a_dead_worker_is_one_error_and_no_broken_pool(backend: str) -> None:
    """A guarded call that kills its process raises WorkerDied in joblib, whose own processes stay well."""
    assert Parallel(n_jobs=2, backend=backend)(delayed(careful)(c) for c in (1, 2, 3)) == ["WorkerDied"] * 3
    with pytest.raises(jaxguard.WorkerDied):
        Parallel(n_jobs=2, backend=backend)(delayed(end_with)(c) for c in (4, 5))


@pytest.mark.parametrize("number", [1, 2, 5])
def test_slot_count_is_the_number_of_slots(slots: Any, number: int) -> None:
    """slot_count is what JAXGUARD_DEVICES offers, counts whole requests, and is never 0."""
    slots(number)
    assert slot_count() == number
    assert slot_count(gpus=2) == max(1, number // 2)


def test_a_request_for_two_slots_waits_for_both(fresh_guard: Any, tmp_path: pathlib.Path) -> None:
    """Calls that need both slots and calls that need one never overlap wrongly, and none starves."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    both = fresh_guard(unsafe_increment, gpus=2, slot_timeout=120)

    def job(i: int) -> int:
        if i % 2:
            return increments(counter, 5, both) - 5
        return cube(i)[0]

    assert Parallel(n_jobs=6, backend="threading")(delayed(job)(i) for i in range(8)) == [
        0 if i % 2 else i**3 for i in range(8)
    ]
    assert counter.read_text() == "20"
    assert all_slots_are_free(2)
