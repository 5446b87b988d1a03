"""What a slot costs: to take and give back, to hand over, to wait for; and on a host with very many devices.

    python tests/benchmarks/cost_of_a_slot.py

Prints a table: what was measured, the aim, the result. Devices are made up (see tests/host.py); the locks are real.
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from filelock import FileLock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import host

from jaxguard import _leases, _slots, gpu_slot, slot_count
from jaxguard._devices import request, usable
from jaxguard.testing import fake_slots

TIMES = 500


def median_s(call: Callable[[], object], times: int = TIMES) -> float:
    """Time a call, after one that is not counted."""
    call()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def say(what: str, aim: str, result: str) -> None:
    """Print one row."""
    print(f"{what:<72} {aim:>10} {result:>10}", flush=True)


def taking(folder: pathlib.Path) -> None:
    """Acquire and release one of 8 devices that nobody else wants, beside one cycle of filelock in the same run."""
    lock = FileLock(folder / "lock")

    def cycle() -> None:
        with lock:
            pass

    def lease() -> None:
        taken = _leases.try_take(asked.candidates, asked.take, asked.units)
        assert taken is not None
        taken.close()

    def slot() -> None:
        with gpu_slot():
            pass

    machine = host.Host(folder / "eight", 8)
    machine.give_nvml()
    machine.enter()
    asked = request(1)
    raw, bare, whole = [], [], []
    for _ in range(5):  # in turns: the machine is not equally quiet all the time
        raw.append(median_s(cycle))
        bare.append(median_s(lease))
        whole.append(median_s(slot))
    base = statistics.median(raw)
    say("one filelock cycle, µs", "", f"{1e6 * base:.0f}")
    say("acquire + release one of 8 devices, to a filelock cycle", "<= 3", f"{statistics.median(bare) / base:.1f}")
    say("the same as a whole `with gpu_slot()`, to a filelock cycle", "", f"{statistics.median(whole) / base:.1f}")
    host.leave()


def hold_and_let_go(connection: object, times: int) -> None:
    """In another process: hold the slot, let it go when told, and say when."""
    for _ in range(times):
        with gpu_slot():
            connection.send("held")  # type: ignore[attr-defined]
            connection.recv()  # type: ignore[attr-defined]
            moment = time.perf_counter()
        connection.send(moment)  # type: ignore[attr-defined]
        connection.recv()  # type: ignore[attr-defined]


def handing_over() -> None:
    """From the release in one process to the next waiter in another."""
    found = []
    with fake_slots(1):
        here, there = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=hold_and_let_go, args=(there, 100))
        process.start()
        for _ in range(100):
            here.recv()
            timer = threading.Timer(0.02, lambda: here.send(None))
            timer.start()
            with gpu_slot():
                got = time.perf_counter()
            found.append(got - here.recv())
            timer.join()
            here.send(None)
        process.join()
    say("hand-over from a release to the next waiter, median, ms", "<= 5", f"{1e3 * statistics.median(found):.2f}")


WAITER = (
    "import logging\nlogging.disable()\nfrom jaxguard import gpu_slot\nprint('w', flush=True)\nwith gpu_slot(): pass\n"
)


def waiting(number: int = 64, for_s: float = 15.0) -> None:
    """The CPU time of 64 processes that wait for one slot."""
    with fake_slots(1), gpu_slot():
        env = {name: value for name, value in os.environ.items() if name != "JAXGUARD_HOLD"}
        path = str(pathlib.Path(__file__).resolve().parents[2])
        env["PYTHONPATH"] = path
        processes = [
            subprocess.Popen([sys.executable, "-c", WAITER], env=env, stdout=subprocess.PIPE) for _ in range(number)
        ]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(12)  # each of them has said once that it waits
        before = sum(cpu_s(process.pid) for process in processes)
        time.sleep(for_s)
        used = sum(cpu_s(process.pid) for process in processes) - before
    for process in processes:
        process.wait()
    say(f"CPU of {number} waiting processes together, of one core", "<= 2 %", f"{100 * used / for_s:.1f} %")


def cpu_s(pid: int) -> float:
    """The CPU time that a process has used."""
    words = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def very_many(folder: pathlib.Path) -> None:
    """A host with 1 000 devices."""
    machine = host.Host(folder / "many", 1000)
    machine.enter()

    def slot() -> None:
        with gpu_slot():
            pass

    for what, call in (
        ("slot_count with 1 000 devices, ms", slot_count),
        ("acquire + release with 1 000 devices, ms", slot),
        (
            "`jaxguard slots` with 1 000 devices, without Python's start, ms",
            lambda: _slots.as_table(_slots.look(usable())),
        ),
    ):
        say(what, "< 100", f"{1e3 * median_s(call, 7):.1f}")
    host.leave()


def main() -> None:
    """Measure and print."""
    os.environ.pop("JAXGUARD_DEVICES", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    with tempfile.TemporaryDirectory() as name:
        taking(pathlib.Path(name))
        very_many(pathlib.Path(name))
    handing_over()
    waiting()


if __name__ == "__main__":
    main()
