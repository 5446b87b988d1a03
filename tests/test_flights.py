"""One of many compiles: waits have a bound, and nobody waits in a circle."""

from __future__ import annotations

import os
import pathlib
import shutil
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import pytest
import raising

from jaxguard import _descriptors, _flights, _phases, _records, _store
from jaxguard._programs import Program

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY, OTHER, THIRD = "ab" * 32, "cd" * 32, "ef" * 32


class Worker:
    """A worker's side of the store, with what JAX would do in it."""

    def __init__(self, folder: pathlib.Path, name: str) -> None:
        self.store = _store.Store(str(folder), "kind")
        self.private = self.store.enter(name)
        self.flights = _flights.Flights(self.store, self.private)

    def needs(self, key: str | None) -> Program:
        program = Program(key=key)
        self.flights.before(program)
        return program

    def has(self, key: str) -> bool:
        return os.path.exists(os.path.join(self.private, f"jit_f-{key}-cache"))

    def compiles(self, program: Program) -> None:
        pathlib.Path(self.private, f"jit_f-{program.key}-cache").write_bytes(zlib.compress(b"a program"))
        program.function, program.compile_s = "f", 2.0
        self.flights.after(program)


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a wait that should not be there end before the test's patience does."""
    monkeypatch.setattr(_flights, "_LONGEST_WAIT_S", 20.0)


@pytest.fixture
def workers(tmp_path: pathlib.Path) -> Iterator[list[Worker]]:
    """Three workers of one store."""
    three = [Worker(tmp_path / "store", name) for name in "abc"]
    yield three
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith(str(tmp_path)):
                _descriptors.close(int(number))
        except OSError:
            continue


def flight_is_free(worker: Worker, key: str) -> bool:
    flight = worker.store.open_flights()
    try:
        return worker.store.take_flight(flight, key)
    finally:
        _descriptors.close(flight)


def test_one_compiles_and_the_others_wait_for_it(workers: list[Worker]) -> None:
    """Who waited has the program, and knows what it saved; meanwhile another program is nobody's affair."""
    first, second, third = workers
    program = first.needs(KEY)
    assert not first.has(KEY), "it is the one to compile"
    waited: list[Program] = []
    thread = threading.Thread(target=lambda: waited.append(second.needs(KEY)))
    thread.start()
    other = third.needs(OTHER)
    third.compiles(other)
    time.sleep(0.1)
    assert not waited, "the second waits"
    first.compiles(program)
    thread.join(30)
    assert second.has(KEY)
    assert (waited[0].fetched, waited[0].saved_s) == (True, 2.0)
    assert flight_is_free(second, KEY)
    assert first.needs(OTHER).fetched


def test_a_program_that_is_there_takes_no_flight(workers: list[Worker]) -> None:
    """Loading happens side by side."""
    first, second, third = workers
    first.compiles(first.needs(KEY))
    flight = third.store.open_flights()
    assert third.store.take_flight(flight, KEY)
    assert second.needs(KEY).fetched
    _descriptors.close(flight)


def test_the_wait_is_bounded(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When a compiler hangs, those that wait say so, then compile for themselves; later ones do not wait at all."""
    monkeypatch.setattr(_flights, "_SAY_SO_S", 0.1)
    monkeypatch.setattr(_flights, "_LONGEST_WAIT_S", 0.3)
    first, second, third = workers
    first.needs(KEY)  # and hangs
    began = time.monotonic()
    program = second.needs(KEY)
    assert 0.3 <= time.monotonic() - began < 20
    assert not program.fetched
    assert [record.getMessage().split("; ")[0].split(" (")[0] for record in caplog.records] == [
        "jaxguard: another worker compiles the same program",
        "jaxguard: waited 0 s for another worker to compile a program",
    ]
    assert third.store.is_marked(KEY)
    monkeypatch.setattr(_flights, "_LONGEST_WAIT_S", 20.0)
    began = time.monotonic()
    assert not third.needs(KEY).fetched
    assert time.monotonic() - began < 20, "it did not wait"
    second.compiles(program)
    assert third.needs(KEY).fetched, "what was compiled at last is there for all"


def test_who_compiles_does_not_wait(workers: list[Worker]) -> None:
    """A compilation inside another one goes on by itself: two that wait for each other's would wait for ever."""
    first, second, _ = workers
    one, other = first.needs(KEY), second.needs(OTHER)
    inner = first.needs(OTHER), second.needs(KEY)
    assert not any(program.fetched for program in inner)
    for worker, program in ((first, inner[0]), (second, inner[1]), (first, one), (second, other)):
        worker.compiles(program)
    assert flight_is_free(first, KEY)
    assert flight_is_free(first, OTHER)
    assert not second.store.is_marked(KEY)


def test_who_compiles_takes_another_flight_that_is_free(workers: list[Worker]) -> None:
    """So that a compilation inside another one is done once, too."""
    first, second, _ = workers
    outer = first.needs(KEY)
    inner = first.needs(OTHER)
    assert not flight_is_free(second, OTHER)
    first.compiles(inner)
    first.compiles(outer)
    assert flight_is_free(second, KEY)


def test_a_compilation_that_fails_lets_go(workers: list[Worker]) -> None:
    """And leaves no mark."""
    first, second, _ = workers
    program = first.needs(KEY)
    program.failed = True
    first.flights.after(program)
    assert flight_is_free(second, KEY)
    assert not second.store.is_marked(KEY)


def test_what_jax_does_not_store_is_marked(workers: list[Worker]) -> None:
    """By the first; the others do not wait for each other."""
    first, second, third = workers
    program = first.needs(KEY)
    first.flights.after(program)
    assert program.stored is False
    flight = third.store.open_flights()
    assert third.store.take_flight(flight, KEY)
    began = time.monotonic()
    assert not second.needs(KEY).fetched
    assert time.monotonic() - began < 20, "it did not wait"
    _descriptors.close(flight)


def test_a_directory_that_cannot_be_written_is_no_reason_for_a_mark(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may well be one that JAX stores."""
    first, *_ = workers
    program = first.needs(KEY)
    real = open

    def refuse(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).startswith(first.private):
            raise OSError(30, "Read-only file system")
        return real(path, *args, **options)

    monkeypatch.setattr("builtins.open", refuse)
    first.flights.after(program)
    monkeypatch.undo()
    assert not first.store.is_marked(KEY)
    assert first.flights.take_lost() == ["Read-only file system"]


def test_a_flight_that_jax_never_tells_the_end_of(workers: list[Worker]) -> None:
    """Somebody has removed JAX's listeners: after the job it is let go of."""
    first, second, _ = workers
    first.needs(KEY)
    first.flights.end_all()
    assert flight_is_free(second, KEY)


def test_a_forked_child_keeps_no_flight(workers: list[Worker]) -> None:
    """A pool that a trial forks while it compiles makes nobody wait."""
    first, second, _ = workers
    program = first.needs(KEY)
    (hears, says), (waits, ends) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ends)
        os.write(says, b"up")
        os.read(waits, 1)
        os._exit(0)
    try:
        assert os.read(hears, 2) == b"up"
        first.compiles(program)
        assert flight_is_free(second, KEY)
    finally:
        os.close(ends)
        os.waitpid(pid, 0)
        for descriptor in (hears, says, waits):
            os.close(descriptor)


def test_what_a_signal_handler_raises_comes_out_of_a_wait(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's time limit, wherever it strikes while a worker waits for another, is not taken for an error of ours."""
    for name, value in {"_LONGEST_WAIT_S": 0.5, "_SHORTEST_POLL_S": 0.0001, "_LONGEST_POLL_S": 0.0002}.items():
        monkeypatch.setattr(_flights, name, value)
    first, second, _ = workers
    program = first.needs(KEY)
    record = _records.new_file("work-of-a-test")
    _phases.begin("of-a-test", record)
    try:
        places = list(raising.everywhere(lambda: second.needs(KEY), most=600))
    finally:
        _phases._after_fork_in_child()
        _descriptors.close(record)
    assert sum("in fetch" in place for place in places) > 3, "it looked, and looked again"
    assert not second.flights._flights, "it has let go of its flight"
    first.compiles(program)
    second.needs(KEY)
    assert second.has(KEY)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_what_a_signal_handler_raises_while_a_program_is_kept_comes_out(workers: list[Worker]) -> None:
    """The same when it is compiled and published: another worker compiles it if it was not, and need not wait."""
    first, second, _ = workers
    keys: list[str] = []

    def compile_another() -> None:
        keys.append(f"{len(keys):015x}".ljust(64, "0"))
        first.compiles(first.needs(keys[-1]))

    places = []
    for place in raising.everywhere(compile_another, most=3000):
        places.append(place)
        first.flights.end_all()
        assert not keys or flight_is_free(second, keys[-1]), place
        for left in pathlib.Path(first.private).iterdir():  # as each run has to have the same lines
            if left.name.startswith(".new-"):
                shutil.rmtree(left)
            elif left.name.endswith("-cache"):
                left.unlink()
    assert {"publish", "end_flight"} <= {place.rpartition(" ")[2] for place in places}, "it came to its end"
    second.needs(keys[-1])
    assert second.has(keys[-1])
