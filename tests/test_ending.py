"""A normal end: a worker ends as a program does, and never later than it may."""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

from jaxguard import _ending

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

# Each appends a word to a file, in the order in which the interpreter would do it.
WORK = textwrap.dedent("""
    import atexit, sys, threading, time
    from concurrent.futures import ThreadPoolExecutor

    def work(path):
        def say(word, after=0.0):
            time.sleep(after)
            with open(path, "a") as file:
                file.write(word + "\\n")

        def thread():
            say("thread", 0.3)
            threading.Thread(target=say, args=("thread of the thread", 0.1)).start()

        def broken():
            say("broken handler")
            raise ValueError("an atexit handler that fails")

        atexit.register(say, "first handler")
        atexit.register(broken)
        atexit.register(say, "last handler")
        threading.Thread(target=thread).start()
        threading.Thread(target=say, args=("daemon", 100), daemon=True).start()
        pool = ThreadPoolExecutor(1)
        for number in range(3):
            pool.submit(say, f"job {number}", 0.1)
        sys.stdout.write("not flushed")
        say("work")
""")
EXPECTED = {"work", "job 0", "job 1", "job 2", "thread", "thread of the thread"}
HANDLERS = ["last handler", "broken handler", "first handler"]


def check(words: list[str]) -> None:
    """Hold a run to the order of the interpreter's own end."""
    assert set(words[:-3]) == EXPECTED
    assert words[0] == "work"
    assert words[-3:] == HANDLERS, "handlers run last, in reverse order, and one that fails stops none"
    assert [word for word in words if word.startswith("job")] == ["job 0", "job 1", "job 2"]


@pytest.mark.parametrize("how", ["interpreter", "ours"])
def test_it_is_the_interpreters_end(run_python: Callable[..., Any], tmp_path: pathlib.Path, how: str) -> None:
    """Threads, executors and handlers end as they do in any program: both ways give the same."""
    code = WORK + f"work({str(tmp_path / 'words')!r})\n"
    code += {"interpreter": "sys.exit(3)\n", "ours": "from jaxguard import _ending\n_ending.end(3)\n"}[how]
    done = run_python(code)

    check((tmp_path / "words").read_text().splitlines())
    assert done.returncode == 3
    assert done.stdout == "not flushed"
    assert "an atexit handler that fails" in done.stderr


def test_a_worker_ends_normally(
    guard: Callable[..., Any], tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], run_python: Callable[..., Any]
) -> None:
    """In each kind of worker threads are joined, executors wound up and atexit handlers run before the end is told."""
    if guard.reuse:  # type: ignore[attr-defined]
        env = ", env={'OMP_DYNAMIC': 'FALSE'}" if guard.way == "exec" else ""  # type: ignore[attr-defined]
        code = WORK + (
            "from jaxguard import isolated_jax_worker\n"
            "if __name__ == '__main__':\n"
            f"    isolated_jax_worker(work, reuse=True{env})({str(tmp_path / 'words')!r})\n"
        )
        run_python(code).check()
    else:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(WORK, namespace)
        guard(namespace["work"])(str(tmp_path / "words"))
        assert "not flushed" in capfd.readouterr().out

    check((tmp_path / "words").read_text().splitlines())


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_the_end_after_a_failure_is_normal_too(
    fresh_guard: Callable[..., Any], tmp_path: pathlib.Path, how: str
) -> None:
    """A trial that raises, or leaves by `sys.exit`, still runs its handlers: wandb and checkpoints finish."""
    import atexit
    import sys

    import jaxguard

    def fail() -> None:
        atexit.register((tmp_path / "words").write_text, "handler")
        if how == "exit":
            sys.exit(4)
        message = "no"
        raise LookupError(message)

    with pytest.raises(LookupError if how == "raise" else jaxguard.WorkerDied):
        fresh_guard(fail)()

    assert (tmp_path / "words").read_text() == "handler"


def test_a_thread_that_never_ends_is_given_up(run_python: Callable[..., Any]) -> None:
    """After the bound the process ends with its exit code, and says which thread kept it."""
    began = time.monotonic()
    done = run_python("""
import threading, time
from jaxguard import _ending
_ending.BOUND_S = 0.5
threading.Thread(target=time.sleep, args=(1000,), name="the loader").start()
_ending.end(7)
""")

    assert done.returncode == 7
    assert "threads the loader still run" in done.stderr
    assert time.monotonic() - began < 60
    assert _ending.BOUND_S == 30.0


def test_a_handler_that_never_ends_is_given_up(run_python: Callable[..., Any]) -> None:
    """The same for an atexit handler; what was printed before is not lost."""
    done = run_python("""
import atexit, sys, time
from jaxguard import _ending
_ending.BOUND_S = 0.5
atexit.register(time.sleep, 1000)
sys.stdout.write("printed")
_ending.end(7)
""")

    assert done.returncode == 7
    assert "atexit handlers still run" in done.stderr
    assert done.stdout == "printed"


def test_streams_that_the_user_closed(run_python: Callable[..., Any]) -> None:
    """A closed or replaced stream does not stop the end."""
    done = run_python("""
import sys
from jaxguard import _ending
sys.stdout.close()
sys.stderr = None
_ending.end(2)
""")

    assert done.returncode == 2
