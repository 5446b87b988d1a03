"""`jaxguard demo`: the real command in a process of its own, and the parts that show a study."""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING, Any

import optuna
import pytest

import jaxguard
from jaxguard import _demo
from jaxguard.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROW = re.compile(r"^ *(\d+)  (complete|pruned|fail|running) +(\S+)  (\S+) +(\S+)(?: s)? +(\S+)(?: s)?$", re.MULTILINE)
GOOD = {"learning_rate": 0.25, "momentum": 0.5, "width": 16}
BAD = {"learning_rate": 0.001, "momentum": 0.0, "width": 16}

# The command, and then a look at what it did to this process.
COMMAND = """
import sys
from jaxguard.__main__ import main
status = main(sys.argv[1:])
from jax._src import xla_bridge
print("JAX started here:", xla_bridge.backends_are_initialized())
sys.exit(status)
"""


def test_a_study_goes_on_and_is_shown(tmp_path: pathlib.Path, run_python: Callable[..., Any]) -> None:
    """The good trial is completed, the bad one pruned by its reports, both shown; JAX does not start in the parent."""
    url = f"sqlite:///{tmp_path}/demo.db"
    study = optuna.create_study(study_name="jaxguard-demo", direction="maximize", storage=url)
    for _ in range(4):  # as many as the pruner wants to see first
        study.add_trial(optuna.trial.create_trial(value=0.6, intermediate_values=dict.fromkeys(range(20), 0.6)))
    study.enqueue_trial(GOOD)
    study.enqueue_trial(BAD)

    # One job: two threads of Optuna may both take the first of two enqueued trials.
    done = run_python(COMMAND, args=["demo", "--trials", "2", "--jobs", "1", "--storage", url]).check()
    assert "2 trials, 1 at a time, on a host with 2 slots.\nThe study has 6 earlier trials.\n" in done.stdout
    rows = ROW.findall(done.stdout)
    assert [row[1] for row in rows] == ["complete"] * 5 + ["pruned"]
    for number, (named, _, value, device, waited, ran) in enumerate(rows[4:], 4):
        assert named == str(number)
        assert 0 < float(value) <= 1
        assert device.startswith("cpu:")
        assert float(waited) >= 0
        assert float(ran) > 0
    assert re.search(r"^Best: trial 4, ", done.stdout, re.MULTILINE)
    assert all(f"\n  {name} = {value}\n" in done.stdout for name, value in GOOD.items())
    accuracy = re.search(r"^Test accuracy: (\d+\.\d\d)%, on 360 images kept apart\.$", done.stdout, re.MULTILINE)
    assert accuracy is not None, done.stdout
    assert float(accuracy[1]) > 95
    assert "JAX started here: False" in done.stdout
    assert done.stderr == ""  # no terminal, no bar

    good, bad = optuna.load_study(study_name="jaxguard-demo", storage=url).trials[4:]
    assert len(good.intermediate_values) == _demo.EPOCHS
    assert 0 < len(bad.intermediate_values) < _demo.EPOCHS


def test_ctrl_c_shows_what_is_there() -> None:
    """On a terminal there is a bar; Ctrl-C ends it, shows the finished trials, and gives status 130."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    demo = subprocess.Popen(
        [sys.executable, "-m", "jaxguard", "demo", "--trials", "99"],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(jaxguard.__file__).resolve().parents[1])},
        start_new_session=True,
    )
    os.close(theirs)
    text, asked, deadline = "", False, time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 1)[0]:
                continue
            try:
                text += os.read(ours, 1 << 16).decode(errors="replace")
            except OSError:  # nobody has the terminal any more
                break
            if not asked and re.search(r"\b[1-9]\d*/99", text) and not select.select([ours], [], [], 0.2)[0]:
                # In the quiet between two trials: while Optuna's thread pool hands out the next one, a Ctrl-C can find
                # it with its own locks half taken, guarded or not.
                os.killpg(demo.pid, signal.SIGINT)  # what a terminal does
                asked = True
        else:
            pytest.fail(f"the demo did not end; its terminal shows:\n{text}")
        status = demo.wait(30)
    finally:
        os.close(ours)
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.wait(30)
    lines = _screen(text)
    assert status == 130, text
    assert lines[0].startswith("99 trials, 2 at a time, on a host with 2 slots."), text
    assert any(re.search(r"\d+%\|.*\| *[1-9]\d*/99 ", line) for line in lines), text
    states = [row[1] for row in ROW.findall("\n".join(line.rstrip() for line in lines))]
    assert "complete" in states, text
    assert "running" not in states, text
    assert "jaxguard: interrupted" in text
    assert "Traceback" not in text
    assert "Test accuracy" not in text


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nonsense", "Could not parse"),
        ("sqlite:////no/such/directory/demo.db", "unable to open database file"),
        ("redis://localhost", "Redis"),
    ],
)
def test_a_storage_that_cannot_be_opened(url: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The option is named, with what the storage says, and the status is 2."""
    with pytest.raises(SystemExit) as end:
        main(["demo", "--storage", url])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "jaxguard demo: error: argument --storage: cannot be opened: " in error
    assert reason in error


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The fix is a command to copy."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["demo"]) == 1
    assert 'pip install "jaxguard[demo]"' in capsys.readouterr().err


def test_a_setting_that_is_not_valid(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The message is the setting's own; there is no traceback."""
    monkeypatch.setenv("JAXGUARD_DEVICES", "gpu0")
    assert main(["demo"]) == 1
    assert capsys.readouterr().err.startswith("jaxguard demo: JAXGUARD_DEVICES='gpu0' is not valid")


def test_a_stored_study_does_not_repeat_itself(tmp_path: pathlib.Path) -> None:
    """The same seed gives the same first trial in a new study, and another one in a study that goes on."""
    stored = argparse.Namespace(storage=f"sqlite:///{tmp_path}/demo.db", seed=3, refuse=pytest.fail)
    fresh = argparse.Namespace(storage=None, seed=3, refuse=pytest.fail)
    first, again, next_one = (
        _demo._study(options).ask().suggest_float("x", 0, 1) for options in (stored, fresh, stored)
    )
    assert first == again
    assert first != next_one


def test_the_table_tolerates_what_is_missing() -> None:
    """A trial without the guard's note, or with half of it, is still a line."""
    note = {"version": 1, "devices": ["GPU-83ab1f0c-1111-2222", "cpu:1"], "waited_s": 0.04, "run_s": 12.0}
    trials = [
        optuna.trial.create_trial(value=0.5, user_attrs={"jaxguard": note}),
        optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL),
        optuna.trial.create_trial(state=optuna.trial.TrialState.PRUNED, user_attrs={"jaxguard": {"run_s": 1}}),
    ]
    for number, trial in enumerate(trials):
        trial.number = number
    assert _demo.table(trials).splitlines() == [
        "trial  state      value  device               waited     ran",
        "    0  complete  0.5000  GPU-83ab1f0c, cpu:1   0.0 s  12.0 s",
        "    1  fail           -  -                         -       -",
        "    2  pruned         -  -                         -   1.0 s",
    ]


class Stream(io.StringIO):
    """What both streams of a program are: a terminal or a file."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        """Say which."""
        return self._terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_output_appears_above_the_bar(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """Lines on both streams, in pieces too, leave the bar whole; why a trial failed is a line; Ctrl-C is not."""
    stream = Stream(terminal=terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    errors: Iterable[type[BaseException] | None] = iter([None, ValueError, KeyboardInterrupt])

    def objective(_: optuna.Trial) -> float:
        print("from a ", end="")
        print("worker")
        print("and its errors", file=sys.stderr)
        print("no end of line", end="")
        if error := next(errors):
            raise error
        return 0.25

    study = optuna.create_study()
    with pytest.raises(KeyboardInterrupt), _demo.progress(9) as show:
        study.optimize(objective, n_trials=9, catch=(ValueError,), callbacks=[show])
    assert sys.stdout is stream
    lines = [line.rstrip() for line in _screen(stream.getvalue())]
    assert lines.pop() == ""
    if terminal:
        assert re.match(r"best 0\.2500: +22%\|.*\| 2/9 ", lines.pop())
    assert lines == [
        "from a worker",
        "and its errors",
        "no end of linefrom a worker",
        "and its errors",
        "Trial 1 failed with parameters: {} because of the following error: ValueError().",
        "no end of linefrom a worker",
        "and its errors",
        "no end of line",
    ]


def _screen(text: str) -> list[str]:
    """Write text as a terminal would that is wide enough: a carriage return goes back over the line."""
    lines, column = [""], 0
    for char in text:
        if char == "\r":
            column = 0
        elif char == "\n":
            lines.append("")
            column = 0
        else:
            line = lines[-1].ljust(column)
            lines[-1] = line[:column] + char + line[column + 1 :]
            column += 1
    return lines
