"""A user's signal handler that raises, at each place in turn where Python runs one: as signals would, without luck.

These places are the beginning of a function and the return from one of C's, where a profiler is called, too. (Python
looks for signals when it jumps back, also; a `with` of a lock begins and ends without a look.)
"""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Swallowed(Exception):
    """What the handler raised did not come out."""


def everywhere(run: Callable[[], object], most: int, code: str = "", whole: int = 1) -> Iterator[str]:
    """Run a function again and again, with TimeoutError raised at the first place, at the second, and so on.

    Args:
        run: The function.
        most: In how many places at most.
        code: A pattern; only places in code whose path, with a colon and the function's name, has it count.
        whole: After how many runs on end that had fewer places it is done: more than one where their number varies.

    Yields:
        Where it was raised, after each run from which it came out.

    Raises:
        Swallowed: With the place where it was raised, but did not come out.
    """
    to_the_end = 0
    for number in range(most):
        where = ""
        places = itertools.count()

        def profile(frame: Any, event: str, _: object, number: int = number, places: Iterator[int] = places) -> None:
            nonlocal where
            if event not in {"call", "c_return"} or frame.f_code.co_flags & inspect.CO_GENERATOR:
                return  # a generator is also "called" to be closed, when nobody looks for signals
            if frame.f_code.co_name == "_joinrealpath":
                return  # of Python, which takes any OSError for a file that is not there
            here = f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
            if re.search(code, here) and next(places) == number:
                where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise TimeoutError("the user's own")  # which also ends the profiling

        before = sys.getprofile()
        gc.disable()  # its finalizers have places, too
        sys.setprofile(profile)
        try:
            run()
        except TimeoutError as error:
            if str(error) != "the user's own":
                raise
        else:
            if where:
                raise Swallowed(where)
            to_the_end += 1
            if to_the_end == whole:
                return
            continue
        finally:
            sys.setprofile(before)
            gc.enable()
        to_the_end = 0
        yield where
