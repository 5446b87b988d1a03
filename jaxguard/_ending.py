"""A normal end: what a Python program does when it is over, for a process that must not unwind its stack.

A worker forked from the keeper stands on the keeper's stack, so it cannot return to the interpreter's own end. This
module does the same steps in the same order: join non-daemon threads (executors have theirs wound up first), run the
atexit handlers, flush. CPython has no public door to the first two; a test tells when these close.

In one thing it is kinder. The interpreter closes executors before it joins threads, so work that still needs one
fails: an asynchronous checkpoint, say. Here such work is waited for before.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from typing import NoReturn

BOUND_S = 30.0
"""For how long threads and handlers may keep a worker, in seconds."""


_EXECUTOR = "concurrent.futures.thread"
_LOOKS, _LOOK_AGAIN_S = 3, 0.001
"""A thread of an executor is at rest between two tasks too, for a moment."""


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
    _finish_work()
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


def _finish_work() -> None:
    """Wait until no thread works that the interpreter would wait for; those of executors wait to be told."""
    quiet = 0
    while quiet < _LOOKS and (threads := [t for t in threading.enumerate() if _is_waited_for(t)]):
        frames = sys._current_frames()  # noqa: SLF001 – documented, underscore and all
        innermost = [frames.get(thread.ident or 0) for thread in threads]
        idle = all(frame is None or frame.f_globals.get("__name__") == _EXECUTOR for frame in innermost)
        quiet = quiet + 1 if idle else 0
        time.sleep(_LOOK_AGAIN_S)


def _is_waited_for(thread: threading.Thread) -> bool:
    return not thread.daemon and thread is not threading.main_thread()


def _give_up(exit_code: int) -> None:
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.name != "MainThread"]
    where = f"threads {', '.join(names)}" if names else "atexit handlers"
    text = f"jaxguard: worker {os.getpid()} is ended {BOUND_S:.0f} s after its work: {where} still run\n"
    sys.stderr.write(text)
    flush()
    os._exit(exit_code)
