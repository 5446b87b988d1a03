"""A normal end: what a Python program does when it is over, for a process that must not unwind its stack.

A worker forked from the keeper stands on the keeper's stack, so it cannot return to the interpreter's own end. This
module does the same steps in the same order: join non-daemon threads (executors have theirs wound up first), run the
atexit handlers, flush. CPython has no public door to the first two; a test tells when these close.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from typing import NoReturn

BOUND_S = 30.0
"""For how long threads and handlers may keep a worker, in seconds."""


def flush() -> None:
    """Flush the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001, S110 – closed by the user, or nobody reads any more
            pass


def end(exit_code: int) -> NoReturn:
    """End this process as a program ends."""
    bound = threading.Timer(BOUND_S, _give_up, [exit_code])
    bound.daemon = True
    bound.start()
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 – see above
    except BaseException:  # noqa: BLE001 – the next steps still happen, as in the interpreter
        traceback.print_exc()
    try:
        atexit._run_exitfuncs()  # noqa: SLF001 – see above
    except BaseException:  # noqa: BLE001 – see above
        traceback.print_exc()
    flush()
    os._exit(exit_code)


def _give_up(exit_code: int) -> None:
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.name != "MainThread"]
    where = f"threads {', '.join(names)}" if names else "atexit handlers"
    text = f"jaxguard: worker {os.getpid()} is ended {BOUND_S:.0f} s after its work: {where} still run\n"
    sys.stderr.write(text)
    flush()
    os._exit(exit_code)
