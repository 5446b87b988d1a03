"""The command line: what it understands, what it refuses, what it costs."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

from jaxguard.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_installed_command_is_this_one() -> None:
    """`jaxguard` and `python -m jaxguard` are the same function."""
    (command,) = metadata.entry_points(group="console_scripts", name="jaxguard")
    assert command.load() is main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "demo"),
        (["demo", "--help"], "--storage URL"),
        (["slots", "--help"], "--json"),
        (["stacks", "--help"], "Nothing is stopped by it"),
        (["doctor", "--help"], "--log-compiles"),
        (["--version"], f"jaxguard {metadata.version('jaxguard')}\n"),
    ],
)
def test_it_explains_itself(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Help and version go to standard output, with status 0."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: COMMAND"),
        (["slot"], "invalid choice: 'slot'"),
        (["demo", "more"], "unrecognized arguments: more"),
        (["demo", "--trials", "0"], "argument --trials: '0' is not a whole number of at least 1"),
        (["demo", "--trials", "ten"], "argument --trials: 'ten' is not a whole number of at least 1"),
        (["demo", "--jobs", "-1"], "argument --jobs: '-1' is not a whole number of at least 1"),
        (["demo", "--jobs", "1.5"], "argument --jobs: '1.5' is not a whole number of at least 1"),
        (["demo", "--seed", "4294967296"], "argument --seed: '4294967296' is not a whole number from 0 to 4294967295"),
    ],
)
def test_it_refuses_what_it_does_not_understand(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad word is named, with what would be valid, and the status is 2."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


LIGHT = """
import sys
from jaxguard.__main__ import main
{more}
try:
    main(["demo", "--help"])
finally:
    heavy = {{"jax", "jaxlib", "joblib", "loky", "numpy", "optuna", "sklearn", "tqdm"}} & set(sys.modules)
    print("loaded:", *sorted(heavy))
"""


@pytest.mark.parametrize(("more", "loaded"), [("", "loaded:\n"), ("import numpy", "loaded: numpy\n")])
def test_asking_for_help_loads_nothing_heavy(more: str, loaded: str, run_python: Callable[..., Any]) -> None:
    """Libraries are imported by the command that needs them; and this test can fail."""
    assert run_python(LIGHT.format(more=more)).check().stdout.endswith(loaded)


def test_it_runs_as_a_module(run_python: Callable[..., Any]) -> None:
    """`python -m jaxguard` calls itself jaxguard and gives argparse's status."""
    done = run_python("import runpy; runpy.run_module('jaxguard', run_name='__main__', alter_sys=True)", args=["no"])
    assert done.returncode == 2
    assert done.stderr.startswith("usage: jaxguard ")
