"""Guarded calls that stay in one phase of their worker until a test lets them go on, or ends something.

Each waits for a file, so that a test can see them there and no sleep decides. Real imports, real pickles, a real
compilation.
"""

from __future__ import annotations

import os
import pathlib
import threading
import time
import zlib
from typing import Any

from jaxguard import _phases, _records, isolated_jax_worker

_PATIENCE_S = 100.0
_FIFOS = 64
WORDS = {
    "starting": "starting",
    "reading": "reading the call",
    "running": "running",
    "compiling": "compiling long_step",
    "answering": "answering",
    "ending": "ending",
}
"""What a worker says of itself in each of them."""
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
        time.sleep(0.2)
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


class Caller(threading.Thread):
    """A guarded call that stays in a phase, in a thread of its own."""

    def __init__(self, phase: str, folder: pathlib.Path, **options: Any) -> None:
        super().__init__()
        self.folder = folder
        env, self.arguments = call_in(phase, folder)
        self.guarded = isolated_jax_worker(work, env=env, **options)
        self.result: Any = None
        self.error: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.guarded(*self.arguments)
        except BaseException as error:  # noqa: BLE001 – the test looks at it
            self.error = error

    @property
    def worker(self) -> int:
        """The worker's pid, once it is in its phase; 0 before."""
        try:
            return int((self.folder / "here").read_text() or 0)
        except FileNotFoundError:
            return 0

    def told(self) -> str:
        """What the worker says that it does, as its parent can read it."""
        records = _records.read_all(os.getpid())
        holds = [word for word, facts in records.items() if facts.get("worker") == self.worker]
        return _phases.in_words(records.get(_phases.word(holds[0]), {})) if holds else "no hold"

    def go_on(self) -> None:
        """Let it, and wait for its end."""
        (self.folder / "go").touch()
        # What XLA writes down is read: then the compilation goes on.
        readers = [os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in self.folder.glob("*.txt")]
        self.join(60)
        for reader in readers:
            os.close(reader)
