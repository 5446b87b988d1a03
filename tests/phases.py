"""Guarded calls that stay in one phase of their worker until a test lets them go on, or ends something.

Each waits for a file, so that a test can see them there and no sleep decides. Real imports, real pickles, a real
compilation.
"""

from __future__ import annotations

import os
import pathlib
import time
import zlib
from typing import Any

_PATIENCE_S = 100.0
_FIFOS = 64
_SITE = """
import os, pathlib, time
if os.environ.get("WAIT_IN"):
    pathlib.Path(os.environ["WAIT_IN"], "here").write_text(str(os.getpid()))
    while not pathlib.Path(os.environ["WAIT_IN"], "go").exists():
        time.sleep(0.01)
"""


def stay(folder: str) -> str:
    """Say that this process is here, and wait until it may go on."""
    (pathlib.Path(folder) / "here").write_text(str(os.getpid()))
    until = time.monotonic() + _PATIENCE_S
    while not (pathlib.Path(folder) / "go").exists() and time.monotonic() < until:
        time.sleep(0.01)
    return folder


class Slow:
    """Takes its time wherever it is unpickled, or pickled."""

    def __init__(self, folder: str, *, to_pickle: bool) -> None:
        self.folder, self.to_pickle = folder, to_pickle

    def __reduce__(self) -> Any:
        return (str, (stay(self.folder),)) if self.to_pickle else (stay, (self.folder,))


def work(folder: str, phase: str, argument: object = None) -> Any:
    """Run until that phase, and stay there."""
    del argument
    if phase == "running":
        stay(folder)
    elif phase == "compiling":
        import jax

        (pathlib.Path(folder) / "here").write_text(str(os.getpid()))
        own = float(zlib.crc32(folder.encode()))  # a program that no other test has compiled

        def long_step(x: Any) -> Any:
            return jax.numpy.sin(x) * own

        jax.jit(long_step)(1.0)  # comes to its end when somebody reads what XLA writes down about it
    elif phase == "answering":
        return Slow(folder, to_pickle=True)
    elif phase == "ending":
        import atexit

        atexit.register(stay, folder)
    return "answer"


def call_in(phase: str, folder: pathlib.Path) -> tuple[dict[str, str], tuple[Any, ...]]:
    """Give the `env=` and the arguments of a guarded call of `work` that stays in a phase."""
    env = {}
    if phase == "starting":
        (folder / "sitecustomize.py").write_text(_SITE)
        env = {"WAIT_IN": str(folder), "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    elif phase == "compiling":
        # XLA writes each module down before it compiles, here into pipes that nobody reads.
        for number in range(_FIFOS):
            os.mkfifo(folder / f"module_{number:04}.jit_long_step.before_optimizations.txt")
        env = {"XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_module_re=.*long_step.*"}
    argument = Slow(str(folder), to_pickle=False) if phase == "reading" else None
    return env, (str(folder), phase, argument)
