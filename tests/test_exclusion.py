"""Exclusion, by arithmetic and under fire: no two holders of one device, no slot lost, whoever is killed when."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from conftest import PLACE
from test_devices import Driver, Script, four_cards, no_cards  # noqa: F401 - fixtures

from jaxguard import _linux, gpu_slot

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = int(os.environ.get("JAXGUARD_TEST_ROUNDS", "24"))
"""How often a process of a real study is killed; the tests of the locks alone have 500 rounds always."""

INCREMENTS = """
import pathlib, sys, time
from jaxguard import gpu_slot
folder = pathlib.Path(sys.argv[1])
print("ready"); input()
for _ in range(25):
    with gpu_slot() as slot:
        counter = folder / slot.devices[0].id
        value = int(counter.read_text() or "0")
        time.sleep(0.001)
        counter.write_text(str(value + 1))
print("done"); input()
"""


def test_eight_programs_on_four_cards(driver: Driver, tmp_path: pathlib.Path) -> None:
    """8 processes x 25 unsafe increments of the counter of the card they hold are 200, and every card was used."""
    driver.give_nvml()
    counters = [tmp_path / name for name in driver.ids]
    for counter in counters:
        counter.write_text("0")
    scripts = [Script(driver.prelude + INCREMENTS, str(tmp_path), JAXGUARD_DEVICES="auto") for _ in range(8)]
    try:
        assert [script.hear() for script in scripts] == ["ready"] * 8
        for script in scripts:
            script.tell()
        assert [script.hear() for script in scripts] == ["done"] * 8
    finally:
        for script in scripts:
            script.__exit__()
    values = [int(counter.read_text()) for counter in counters]
    assert sum(values) == 200
    assert all(values)


TAKE_ONE = """
import time
from jaxguard import gpu_slot
print("ready"); input()
while True:
    with gpu_slot():
        time.sleep(0.002)
"""


@pytest.mark.parametrize("asked", [{"gpus": 4}, {"gpus": 2}, {"devices": [1, 3], "gpus": 2}], ids=str)
def test_a_request_for_several_is_not_starved(driver: Driver, asked: dict[str, object]) -> None:
    """In a stream of requests for one card each, one for several keeps its place and is served, again and again."""
    scripts = [Script(driver.prelude + TAKE_ONE, JAXGUARD_DEVICES="auto") for _ in range(6)]
    try:
        assert [script.hear() for script in scripts] == ["ready"] * 6
        for script in scripts:
            script.tell()
        for _ in range(5):
            with gpu_slot(**asked, slot_timeout=60) as slot:  # type: ignore[call-overload]
                assert len(slot.devices) == asked["gpus"]
    finally:
        for script in scripts:
            script.__exit__()


# A witness is an abstract socket, named after holder and hold: it is made under the slot and goes before the slot
# goes. Of a process that is being killed, the kernel may take the slot back before the witness: it does not count.
ACTORS = """
import itertools, os, random, signal, socket, sys, time
from jaxguard import gpu_slot
name, rounds, actors, share = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
report, tell = os.pipe()
EXITING = 4  # PF_EXITING

def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    return words[0] not in "ZX" and not int(words[6]) & EXITING

def seen(device):
    with open("/proc/net/unix") as table:
        return {row.strip() for row in table if f"@{name}/{device}/" in row}

def holders(device):
    # The table is not read in one moment, so one who goes and one who comes meanwhile are both in it: look twice.
    words = {row.rpartition("@")[2] for row in seen(device)} & {row.rpartition("@")[2] for row in seen(device)}
    return sum(lives(int(word.split("/")[-2])) for word in words)

def act():
    random.seed()
    for hold in itertools.count():
        witness = socket.socket(socket.AF_UNIX)
        with gpu_slot(gpus=share) as slot:
            device = slot.devices[0].id
            witness.bind(f"\\0{name}/{device}/{os.getpid()}/{hold}")
            if holders(device) > round(1 / slot.share):
                os.write(tell, b"x")
            time.sleep(random.random() * 0.003)
            witness.close()
        os.write(tell, b".")

def start():
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(1)
    return pid

random.seed(int(sys.argv[5]))
pids = [start() for _ in range(actors)]
for _ in range(rounds):
    time.sleep(random.random() * 0.006)
    index = random.randrange(actors)
    os.kill(pids[index], signal.SIGKILL)
    os.waitpid(pids[index], 0)
    pids[index] = start()
for pid in pids:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
with gpu_slot(gpus=2, slot_timeout=20):
    pass
os.set_blocking(report, False)
data = b""
while True:
    try:
        data += os.read(report, 1 << 16)
    except BlockingIOError:
        break
print(data.count(b"x"), data.count(b"."))
"""


@pytest.mark.parametrize("share", [1, 0.5], ids=["whole", "halves"])
def test_five_hundred_deaths(slots: Callable[[int], None], share: float) -> None:
    """Holders and waiters are SIGKILLed at random moments, 500 times: never one too many, and no slot is lost."""
    slots(2)
    seed = random.randrange(1 << 30)
    done = subprocess.run(
        [sys.executable, "-c", ACTORS, f"witness-{os.getpid()}-{seed}", "500", "6", str(share), str(seed)],
        env={**os.environ, "PYTHONPATH": PLACE},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    doubles, turns = map(int, done.stdout.split())
    assert doubles == 0, f"seed {seed}"
    assert turns > 100, f"seed {seed}: somebody has always held"


def test_the_witness_would_tell(slots: Callable[[int], None]) -> None:
    """The count above can fail: without the locks the witnesses see too many holders."""
    slots(2)
    broken = "from jaxguard import _locks\n_locks.lock_units = lambda *a: [(0, a[2])]\n"
    done = subprocess.run(
        [sys.executable, "-c", broken + ACTORS, f"witness-{os.getpid()}-x", "40", "6", "1", "7"],
        env={**os.environ, "PYTHONPATH": PLACE},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert int(done.stdout.split()[0]) > 0, done.stderr


PROGRAM = """
import os, random, socket, sys, threading, time
from jaxguard import isolated_jax_worker

def job(name, report):
    import os, random, socket, time
    seat = socket.socket(socket.AF_UNIX)
    os.dup2(seat.fileno(), 0)  # the lowest of all: it goes first when this process dies
    seat.close()
    seat = socket.socket(fileno=0)
    try:
        seat.bind(f"\\0{name}")
    except OSError:
        with open(report, "a") as file:
            file.write("DOUBLE\\n")
    time.sleep(random.random() * 0.02)
    seat.close()

guarded = isolated_jax_worker(job)

def loop():
    while True:
        try:
            guarded(*sys.argv[1:])
            print(".", flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)

threads = [threading.Thread(target=loop, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
input()
"""


def family(pid: int) -> list[int]:
    """A process and all that descends from it, itself first."""
    found = [pid]
    for parent in found:
        found += sorted(_linux.children(parent))
    return found


def test_deaths_in_the_family(
    slots: Callable[[int], None], tmp_path: pathlib.Path, wait_until: Callable[..., None]
) -> None:
    """Programs with two guarded threads on one slot; parent, keeper or worker is killed at random moments."""
    slots(1)
    dice = random.Random()
    output = open(tmp_path / "out", "w")  # noqa: SIM115 – closed below
    errors = open(tmp_path / "err", "w")  # noqa: SIM115 – as above

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, f"seat-{os.getpid()}", str(tmp_path / "report")],
            env={**os.environ, "PYTHONPATH": PLACE},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
        )

    def done() -> int:
        return (tmp_path / "out").read_text().count(".")

    programs = [start(), start()]
    seen: set[int] = set()
    try:
        for number in range(ROUNDS):
            if number % 4 == 0:  # now and then somebody must come through
                before = done()
                wait_until(lambda before=before: done() > before, "a call is done")  # type: ignore[misc]
            time.sleep(dice.random() * 0.25)
            index = dice.randrange(2)
            members = family(programs[index].pid)
            seen.update(members)
            # A parent is dear to start again: one round in eight.
            victim = members[0] if number % 8 == 7 else dice.choice(members[1:] or members)
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
            if victim == members[0]:
                programs[index].wait(30)
                assert programs[index].stdin is not None
                programs[index].stdin.close()
                programs[index] = start()
    finally:
        for program in programs:
            seen.update(family(program.pid))
            program.kill()
            program.wait(30)
            program.stdin.close()  # type: ignore[union-attr]
        output.close()
        errors.close()
    with gpu_slot(slot_timeout=20):
        pass
    until = time.monotonic() + 20
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in seen) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in seen if pathlib.Path(f"/proc/{pid}").exists()], "somebody outlives the family"
    assert not (tmp_path / "report").exists(), "two had the one slot"
