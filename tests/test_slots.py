"""`jaxguard slots`: what it shows of devices, holders and the line, to whom."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import pytest
from test_devices import Driver, Script, four_cards, no_cards  # noqa: F401 - fixtures
from test_leases import CARDS, take

from jaxguard import _beacons, _linux, _parties, _records, gpu_slot, isolated_jax_worker
from jaxguard.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run the command for scripts and read what it prints."""
    capsys.readouterr()
    assert main(["slots", "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def table(capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command for people."""
    capsys.readouterr()
    assert main(["slots"]) == 0
    return capsys.readouterr().out


def test_free_slots(slots: Callable[[int], None], capsys: pytest.CaptureFixture[str]) -> None:
    """Devices that nobody holds are FREE; the JSON has a version."""
    slots(2)
    view = shown(capsys)
    assert (view["version"], view["host"], view["line"]) == (1, socket.gethostname(), [])
    assert [(d["id"], d["index"], d["kind"], d["state"], d["held"]) for d in view["devices"]] == [
        ("cpu:0", 0, "cpu", "FREE", 0.0),
        ("cpu:1", 1, "cpu", "FREE", 0.0),
    ]
    assert table(capsys).splitlines() == ["DEVICE  KIND  STATE  WHO", "cpu:0   cpu   FREE", "cpu:1   cpu   FREE"]


def test_a_running_trial_and_who_waits(
    slots: Callable[[int], None], capsys: pytest.CaptureFixture[str], wait_until: Callable[..., None], tmp_path: Any
) -> None:
    """A holder is shown with user, pid, command, function, study, trial and phase; so is who waits."""
    slots(1)
    study = optuna.create_study(study_name="digits")

    @isolated_jax_worker
    def objective(trial: optuna.Trial, stop: str) -> float:
        import time

        while not os.path.exists(stop):
            time.sleep(0.01)
        return trial.suggest_float("x", 0, 1)

    thread = threading.Thread(
        target=lambda: study.optimize(lambda trial: objective(trial, str(tmp_path / "stop")), n_trials=2, n_jobs=2)
    )
    thread.start()
    try:

        def both() -> bool:
            view = shown(capsys)
            views.append(view)
            return [party["trial"] is not None for party in (*view["devices"][0]["holders"], *view["line"])] == [
                True
            ] * 2

        views: list[dict[str, Any]] = []
        wait_until(lambda: both() and len(views[-1]["line"]) == 1, "one trial runs, and one waits")
        view = views[-1]
        text = table(capsys)
    finally:
        (tmp_path / "stop").touch()
        thread.join(60)
    (holder,), (waiter,) = view["devices"][0]["holders"], view["line"]
    for party in (holder, waiter):
        assert (party["pid"], party["proved"], party["uid"]) == (os.getpid(), True, os.getuid())
        assert party["study"] == "digits"
        assert "objective" in party["function"]
    assert {holder["trial"], waiter["trial"]} == {0, 1}
    assert (holder["phase"], waiter["phase"]) == ("running", "waiting")
    assert (view["devices"][0]["state"], holder["share"]) == ("HELD", 1.0)
    assert f"trial {holder['trial']} of study 'digits'" in text
    assert "1 waiting, the first in the line first:" in text
    assert shown(capsys)["devices"][0]["state"] == "FREE"


def test_a_warm_worker_is_called_that(
    slots: Callable[[int], None], capsys: pytest.CaptureFixture[str], wait_until: Callable[..., None]
) -> None:
    """A worker that is kept for the next call holds its slot, and says for what."""
    slots(1)
    isolated_jax_worker(reuse=True)(os.getpid)()
    assert shown(capsys)["devices"][0]["holders"][0]["phase"] == "warm"
    wait_until(lambda: shown(capsys)["devices"][0]["state"] == "FREE", "it retires")


def test_cards_in_every_state(driver: Driver, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """FREE, HELD (a part too), FOREIGN and UNKNOWN."""
    from jaxguard import _tenants

    monkeypatch.setattr(_tenants, "_FIRST_NAMESPACE", os.readlink("/proc/self/ns/pid"))
    driver.give_nvml(_1={"processes": [[99_999_999, 3 << 30]]}, _3={"processes": None})
    driver.enter()
    with gpu_slot(gpus=0.5, devices=[0]):
        view = shown(capsys)
        text = table(capsys)
    assert [device["state"] for device in view["devices"]] == ["HELD", "FOREIGN", "FREE", "UNKNOWN"]
    assert [device["held"] for device in view["devices"]] == [0.5, 0, 0, 0]
    assert view["devices"][0]["holders"][0]["share"] == 0.5
    assert view["devices"][1]["foreign"][0]["pid"] == 99_999_999
    assert view["devices"][0]["memory_bytes"] == 80 << 30
    assert f"0 {driver.ids[0]}" in text
    assert "HELD 50%" in text
    assert "99999999" in text
    assert "UNKNOWN: free for jaxguard" in text


def test_looking_makes_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A directory that is not there is an error of a command that only looks."""
    monkeypatch.setenv("JAXGUARD_DIR", str(tmp_path / "none"))
    assert main(["slots"]) == 1
    assert "JAXGUARD_DIR" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_what_is_not_known_is_empty(slots: Callable[[int], None], capsys: pytest.CaptureFixture[str]) -> None:
    """A block of this process has no study and no trial."""
    slots(1)
    with gpu_slot():
        (holder,) = shown(capsys)["devices"][0]["holders"]
    assert (holder["function"], holder["study"], holder["trial"]) == ("gpu_slot", "", None)


def test_programs_are_called_as_ps_calls_them() -> None:
    """A Python by its script, anything else by its own name."""
    for words, name in (
        (["sleep", "60"], "sleep"),
        ([sys.executable, "-c", "input()"], f"{Path(sys.executable).name} -c"),
    ):
        with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
            until = time.monotonic() + 30
            while _linux.command(process.pid) != name and time.monotonic() < until:
                time.sleep(0.01)  # between fork and exec it is still this program
            assert _linux.command(process.pid) == name
            process.kill()


def test_a_setting_that_is_not_valid(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The message goes to standard error, with status 1, and without a traceback."""
    monkeypatch.setenv("JAXGUARD_DEVICES", "gpu")
    assert main(["slots"]) == 1
    assert capsys.readouterr().err.startswith("jaxguard: JAXGUARD_DEVICES='gpu' is not valid.")


def test_neither_jax_nor_cuda_is_touched() -> None:
    """The command imports neither JAX nor Optuna nor NumPy."""
    code = (
        "import sys\nfrom jaxguard.__main__ import main\nmain(['slots'])\n"
        "print(sorted({'jax', 'jaxlib', 'numpy', 'optuna', 'loky', 'joblib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


def test_a_holder_that_cannot_be_seen(slots: Callable[[int], None], capsys: pytest.CaptureFixture[str]) -> None:
    """A slot whose lock is held and whose holder's beacon is elsewhere is HELD."""
    from jaxguard import _descriptors, _devices, _linux, _locks

    slots(1)
    locks = _locks.open_locks()
    assert _linux.lock_range(locks, _locks.start_of(_devices.usable()[0].lock), 840)
    assert "HELD   a process that cannot be seen from here" in table(capsys)
    _descriptors.close(locks)


# ---------------------------------------------------------------------------------------- what others may know


@pytest.fixture
def card() -> str:
    """Give the name of a card that no other test has."""
    return f"GPU-{uuid.uuid4()}"


def behind(card: str) -> _parties.Party:
    (beacon,) = (b for b in _beacons.seen() if b.place == _beacons.place(card))
    return _parties.behind(beacon)


def test_a_command_cannot_steer_the_terminal(card: str) -> None:
    """What another program calls itself, or its study, is shown without control characters."""
    code = (
        CARDS
        + "lease = take(sys.argv[1])\nlease.tell(study='a\\x1b[2Jb', trial=1, phase='\\n')\nprint('held'); input()\n"
    )
    with Script(code, card) as holder:
        assert holder.hear() == "held"
        party = behind(card)
        assert party.pid == holder.pid
        assert party.study == "a?[2Jb"
        assert party.phase == "?"
    assert _linux.printable("a\x1b\x07\u202eb\u00e9") == "a???b\u00e9"


def test_long_names_are_cut(card: str) -> None:
    """A record has a bounded size, whatever a study is called."""
    lease = take(card)
    assert lease is not None
    lease.tell(study="\U0001f600" * 10_000, function="x" * 100_000, trial=7, phase="running")
    assert behind(card).trial == 7
    assert len(behind(card).study) == 200
    lease.close()


def test_a_record_behind_a_descriptor_that_is_gone() -> None:
    """The descriptor that lists the others is closed when they are looked at: it ends no search."""
    hole = os.open("/dev/null", os.O_RDONLY)
    record = _records.Record("a" * 12, {"trial": 5})
    os.close(hole)  # the next one gets this number, below that of the record
    assert record._file > hole
    assert _records.read(os.getpid(), "a" * 12) == {"trial": 5}
    record.close()


def test_records_that_are_not_ours(tmp_path: Any) -> None:
    """Whatever a file of that name holds, it is no error and no more than facts."""
    for number, content in enumerate([b"", b"[]", b"{", b"\xff\xfe", b'{"trial": "x", "study": 3}' + b" " * 9000]):
        word = f"{number:012x}"
        file = os.memfd_create(f"jaxguard-{word}")
        os.write(file, content)
        assert _records.read(os.getpid(), word) == ({"trial": "x", "study": 3} if number == 4 else {})
        os.close(file)
    assert _records.read(99_999_999, "0" * 12) == {}


def test_a_record_is_torn_by_no_reader(card: str) -> None:
    """A reader sees one state or the next."""
    lease = take(card)
    assert lease is not None
    stop = threading.Event()

    def tell() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            lease.tell(trial=number, study=str(number) * (1 + number % 7), phase="running")

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        for _ in range(300):
            party = behind(card)
            assert party.trial is None or party.study == str(party.trial) * (1 + party.trial % 7)
    finally:
        stop.set()
        thread.join(30)
        lease.close()


def test_a_record_that_is_closed_is_written_no_more(tmp_path: Any) -> None:
    """Whoever still means to change it writes nothing: its descriptor may be a file by now."""
    record = _records.Record("0" * 12, {"trial": 1})
    number = record._file
    record.close()
    files = [open(tmp_path / str(index), "w") for index in range(64)]  # noqa: SIM115 – all at once
    try:
        assert number in {file.fileno() for file in files}
        record.tell(trial=2)
        record.close()
    finally:
        for file in files:
            file.close()
    assert not any(path.stat().st_size for path in tmp_path.iterdir())
