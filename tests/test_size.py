"""Size: floods of output, large arguments and results, functions that carry much with them."""

from __future__ import annotations

import os
import pathlib
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from jaxguard import isolated_jax_worker

if TYPE_CHECKING:
    from collections.abc import Callable

MB = 1_000_000


@pytest.mark.parametrize("reuse", [False, True])
def test_a_flood_of_100_mb(reuse: bool, run_python: Callable[..., Any], tmp_path: pathlib.Path) -> None:  # noqa: FBT001
    """On each stream: it blocks nobody, all of it arrives, and the parent does not grow by it."""
    code = textwrap.dedent("""
        import os, resource, sys
        from jaxguard import isolated_jax_worker

        def peak_mb():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000

        def flood(descriptor, letter):
            chunk = letter * 1_000_000
            for _ in range(100):
                done = 0
                while done < len(chunk):
                    done += os.write(descriptor, chunk[done:])
            return 7

        guarded = isolated_jax_worker(flood, reuse=sys.argv[1] == "True")
        assert guarded(1, b"") == 7
        before = peak_mb()
        assert guarded(1, b"o") == guarded(2, b"e") == 7
        with open(sys.argv[2], "w") as file:
            file.write(str(peak_mb() - before))
    """)
    grown = tmp_path / "grown"
    done = run_python(code, args=[str(reuse), str(grown)]).check()
    assert (done.stdout.count("o"), done.stderr.count("e")) == (100 * MB, 100 * MB)
    assert float(grown.read_text()) < 20


def test_a_failure_after_a_flood_shows_its_end(fresh_guard: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Only the last of what was written is kept for the error."""

    def flood() -> None:
        os.write(2, b"x" * 10 * MB)
        os.write(2, b"\nlast words\n")
        os._exit(3)

    with pytest.raises(Exception, match="last words") as caught:
        fresh_guard(flood)()
    assert len(str(caught.value)) < 10_000
    assert capfd.readouterr().err.count("x") == 10 * MB


WAYS = {
    "an argument": "isolated_jax_worker(lambda x: float(x[0] + x[-1]))(data)",
    "a capture": "isolated_jax_worker(lambda: float(data[0] + data[-1]))()",
    "a result": "result = isolated_jax_worker(lambda: np.ones(SIZE // 8))()",
    "a result of JAX": "result = isolated_jax_worker(lambda: __import__('jax').numpy.ones(SIZE // 4))()",
}


@pytest.mark.parametrize("way", list(WAYS))
def test_the_peak_of_memory(way: str, run_python: Callable[..., Any], memory_group: pathlib.Path) -> None:
    """Parent, worker and what is between them never hold more than 2.2 times the data, as the kernel counts."""
    code = textwrap.dedent("""
        import os, sys
        group = sys.argv[1]
        with open(group + "/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
        import numpy as np
        from jaxguard import isolated_jax_worker

        SIZE = 400_000_000
        data = np.ones(SIZE // 8 if "data" in sys.argv[2] else 1)

        def read(*names):
            path = next(path for name in names if os.path.exists(path := f"{group}/memory.{name}"))
            with open(path) as file:
                return int(file.read())

        isolated_jax_worker(lambda: __import__("jax").numpy.ones(3))()
        before = read("usage_in_bytes", "current") - data.nbytes
        eval(compile(sys.argv[2], "way", "exec"))
        print((read("max_usage_in_bytes", "peak") - before) / SIZE)
    """)
    done = run_python(code, args=[str(memory_group), WAYS[way]]).check()
    assert 1.0 < float(done.stdout) < 2.2


def test_a_large_capture_is_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    """Which variable of which function, how large, and what to do; for small ones nothing is said."""
    images = np.ones(20 * MB)

    def objective() -> float:
        return float(images[0])

    def small() -> float:
        return 1.0

    for _ in range(2):
        assert isolated_jax_worker(objective)() == 1.0
        assert isolated_jax_worker(small)() == 1.0
    (record,) = [record.getMessage() for record in caplog.records if "carries" in record.getMessage()]
    assert "objective carries 160 MB, most of it variable 'images' of function" in record
    assert "a numpy.ndarray, to each worker" in record
    assert "Load the data inside the function" in record


def test_what_is_large_is_found_deep_inside(caplog: pytest.LogCaptureFixture) -> None:
    """In an attribute of an object in a list, too; and bytes, which have no size of their own in NumPy's sense."""

    class Data:
        def __init__(self) -> None:
            self.text = b"x" * 120 * MB

    held = [Data()]

    def train() -> int:
        return len(held[0].text)

    assert isolated_jax_worker(train)() == 120 * MB
    (record,) = [record.getMessage() for record in caplog.records if "carries" in record.getMessage()]
    assert "train carries 120 MB" in record
    assert "attribute 'text' of entry 0 of variable 'held'" in record
    assert "a bytes, to each worker" in record
