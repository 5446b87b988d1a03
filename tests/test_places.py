"""A guarded call is the same wherever it is made, and never waits for its own ancestor."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import joblib
import pytest

import jaxguard

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

# What a script prints about itself when its guarded calls are done: did JAX start in the parent?
PARENT_STATE = """
from jax._src import xla_bridge
print("jax started:", xla_bridge.backends_are_initialized())
"""


def triangle(number: int) -> tuple[int, int]:
    """Do a little JAX; return the value and the process that did it."""
    import jax.numpy as jnp

    return int(jnp.arange(number + 1).sum()), os.getpid()


# joblib's multiprocessing backend pickles by name, so these have names of their own.
@jaxguard.isolated_jax_worker
def fork_fresh(number: int) -> tuple[int, int]:
    """Guarded, a fresh forked worker for each call."""
    return triangle(number)


@jaxguard.isolated_jax_worker(reuse=True)
def fork_warm(number: int) -> tuple[int, int]:
    """Guarded, warm forked workers."""
    return triangle(number)


@jaxguard.isolated_jax_worker(env={"OMP_DYNAMIC": "FALSE"}, reuse=True)
def exec_warm(number: int) -> tuple[int, int]:
    """Guarded, warm interpreters."""
    return triangle(number)


def from_a_daemon(name: str, number: int) -> tuple[bool | None, int]:
    """Call a guarded function of this module; say whether that happened in a daemonic process."""
    return multiprocessing.current_process().daemon, globals()[name](number)[0]


def all_slots_are_free() -> bool:
    """Prove it: a call that needs both slots gets them without waiting."""
    return bool(jaxguard.isolated_jax_worker(os.getpid, gpus=2, slot_timeout=0)())


# ---------------------------------------------------------------- threads and joblib


def test_the_main_thread_gets_a_process_of_its_own(guard: Callable[..., Any]) -> None:
    """The call runs elsewhere, gives the plain value, and leaves no slot taken."""
    guarded = guard(triangle)

    value, pid = guarded(4)

    assert value == 10
    assert pid != os.getpid()


def test_threads_run_side_by_side(guard: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """Two threads hold two slots at the same time, in two processes."""

    @guard
    def meet(me: int) -> int:
        import pathlib
        import time

        place = pathlib.Path(str(tmp_path))
        (place / f"here-{me}").touch()
        deadline = time.monotonic() + 60
        while not (place / f"here-{1 - me}").exists():
            if time.monotonic() > deadline:
                message = "the other thread's worker never came"
                raise TimeoutError(message)
            time.sleep(0.005)
        return os.getpid()

    pids = joblib.Parallel(n_jobs=2, backend="threading")(joblib.delayed(meet)(me) for me in range(2))

    assert len({*pids, os.getpid()}) == 3


@pytest.mark.parametrize("backend", ["threading", "loky", "multiprocessing"])
def test_joblib_with_more_jobs_than_slots(backend: str, slots: Callable[[int], None]) -> None:
    """Every call of every joblib backend is done, in order, though three jobs share two slots."""
    slots(2)

    results = joblib.Parallel(n_jobs=3, backend=backend)(joblib.delayed(fork_fresh)(n) for n in range(6))

    assert [value for value, _ in results] == [0, 1, 3, 6, 10, 15]
    assert len({pid for _, pid in results}) == 6, "a fresh process for each call"


def test_warm_workers_under_loky() -> None:
    """`reuse=True` works in joblib's worker processes too."""
    results = joblib.Parallel(n_jobs=2, backend="loky")(joblib.delayed(fork_warm)(n) for n in range(4))

    assert [value for value, _ in results] == [0, 1, 3, 6]


@pytest.mark.parametrize("name", ["fork_fresh", "exec_warm"])
def test_daemonic_processes_may_guard(name: str) -> None:
    """A daemonic process may not have children, and its guarded calls work all the same."""
    calls = (joblib.delayed(from_a_daemon)(name, number) for number in (2, 3))

    assert joblib.Parallel(n_jobs=2, backend="multiprocessing")(calls) == [(True, 3), (True, 6)]


# ---------------------------------------------------------------- how a program is started


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_scripts(run_python: Callable[..., Any], how: str) -> None:
    """A script needs no `if __name__ == "__main__"`, runs once, and keeps its own JAX unstarted."""
    code = textwrap.dedent("""
        import os
        import jax
        from jaxguard import isolated_jax_worker

        print("top level")

        @jax.jit
        def double(x):
            return 2 * x

        class Config:
            factor = 3

        @isolated_jax_worker
        def fresh(x):
            return double(x) * Config.factor, os.getpid()

        @isolated_jax_worker(reuse=True)
        def warm(x):
            return double(x) * Config.factor, os.getpid()

        for guarded in fresh, warm:
            value, pid = guarded(7.0)
            print(type(value).__module__, float(value), pid != os.getpid())
    """)

    done = run_python(code + PARENT_STATE, how=how).check()

    expected = ["top level", "numpy 42.0 True", "numpy 42.0 True", "jax started: False"]
    assert done.stdout.splitlines() == expected
    assert done.stderr == ""


def test_a_package_run_with_m(run_python: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """Functions of `python -m package` may use the package's own modules, also by relative import."""
    package = tmp_path / "tuning"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.py").write_text("def loss(x):\n    return x * x\n")
    (package / "__main__.py").write_text(
        textwrap.dedent("""
            import os
            from jaxguard import isolated_jax_worker
            from . import model
            from .model import loss

            @isolated_jax_worker
            def objective(x):
                from .model import loss as again
                return loss(x) + model.loss(x) + again(x), os.getpid()

            value, pid = objective(3)
            print(value, pid != os.getpid())
        """)
    )

    done = run_python(f"import os, sys; os.execv(sys.executable, [sys.executable, '-m', '{package.name}'])").check()

    assert done.stdout.splitlines() == ["27 True"]
    assert done.stderr == ""


def test_a_notebook(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function defined in a cell runs in a worker; what it prints and where it failed shows in its cell."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    place = os.path.dirname(os.path.dirname(os.path.abspath(jaxguard.__file__)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [place, os.environ.get("PYTHONPATH")])))
    cells = [
        """
        import os
        import jax.numpy as jnp
        from jaxguard import isolated_jax_worker

        @isolated_jax_worker
        def objective(x):
            print("printed in the worker")
            os.write(1, b"native output\\n")
            return float(jnp.square(x)), os.getpid()
        """,
        """
        value, pid = objective(3.0)
        print(value, pid != os.getpid())
        """,
        """
        @isolated_jax_worker(reuse=True)
        def fails(x):
            return x / 0  # this very line

        fails(1)
        """,
        PARENT_STATE,
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])

    nbclient.NotebookClient(
        notebook,
        timeout=90,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()

    _, called, failed, state = (cell.outputs for cell in notebook.cells)
    text = "".join(output.text for output in called)
    assert "printed in the worker" in text
    assert "native output" in text
    assert "9.0 True" in text
    assert failed[-1].ename == "ZeroDivisionError"
    assert "return x / 0  # this very line" in "\n".join(failed[-1].traceback)
    assert "jax started: False" in state[0].text


# ---------------------------------------------------------------- nesting


def test_a_nested_call_runs_in_the_same_process(guard: Callable[..., Any], slots: Callable[[int], None]) -> None:
    """Inside a worker, guarded calls and slots use what the worker holds, in all its threads."""
    slots(1)
    inner = jaxguard.isolated_jax_worker(os.getpid, reuse=guard.reuse)  # type: ignore[attr-defined]

    @guard
    def outer() -> list[int]:
        pids = [os.getpid(), inner()]
        thread = threading.Thread(target=lambda: pids.append(inner()))
        thread.start()
        thread.join(30)
        with jaxguard.gpu_slot(slot_timeout=0):
            pids.append(inner())
        with jaxguard.isolated_jax_worker(slot_timeout=0) as worker:
            pids.append(worker(os.getpid))
        return pids

    pids = outer()

    assert len(pids) == 5
    assert len(set(pids)) == 1
    assert pids[0] != os.getpid()


def test_recursion(fresh_guard: Callable[..., Any], slots: Callable[[int], None]) -> None:
    """A guarded function may call itself: one process, one slot."""
    slots(1)
    pids: list[int] = []

    @fresh_guard
    def factorial(number: int) -> int:
        pids.append(os.getpid())
        return number * factorial(number - 1) if number else 1

    assert factorial(5) == 120
    assert pids == [], "the parent's list is not the worker's"


@pytest.mark.parametrize("reuse", [False, True])
def test_inside_gpu_slot_the_call_stays_here(slots: Callable[[int], None], reuse: bool) -> None:  # noqa: FBT001
    """A thread that holds a slot runs guarded functions itself; another thread needs a slot of its own."""
    slots(2)
    guarded = jaxguard.isolated_jax_worker(os.getpid, reuse=reuse)
    elsewhere: list[int] = []

    with jaxguard.gpu_slot():
        here = guarded()
        thread = threading.Thread(target=lambda: elsewhere.append(guarded()))
        thread.start()
        thread.join(60)

    assert here == os.getpid()
    assert elsewhere
    assert elsewhere[0] != os.getpid()
    assert guarded() != os.getpid(), "after the block, calls go out again"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"env": {"A": "1"}}, "env"),
        ({"timeout": 60}, "timeout"),
        ({"gpus": 2}, "gpus"),
    ],
)
def test_a_nested_call_that_needs_another_process_is_refused(
    fresh_guard: Callable[..., Any], slots: Callable[[int], None], options: dict[str, Any], word: str
) -> None:
    """A nested call raises at once, and names the option, if its own process cannot give what it asks for."""
    slots(2)

    @fresh_guard
    def outer() -> str:
        inner = jaxguard.isolated_jax_worker(os.getpid, **options)
        try:
            inner()
        except jaxguard.JaxguardError as error:
            return str(error)
        return "not refused"

    assert word in outer()
    with jaxguard.gpu_slot(), pytest.raises(jaxguard.JaxguardError, match=word):
        jaxguard.isolated_jax_worker(os.getpid, **options)()
    assert all_slots_are_free()


@pytest.mark.parametrize(("method", "reuse"), [("fork", True), ("spawn", False), ("subprocess", True)])
def test_a_child_process_of_a_trial_may_not_guard(
    slots: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    reuse: bool,  # noqa: FBT001
) -> None:
    """Nobody waits for an ancestor: a guarded call in a child of a worker raises at once, though a slot is free."""
    slots(2)

    @jaxguard.isolated_jax_worker(reuse=reuse)
    def trial() -> str:
        if method == "subprocess":
            code = "import os, jaxguard; jaxguard.isolated_jax_worker(os.getpid)()"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
            return done.stderr
        with multiprocessing.get_context(method).Pool(1) as pool:
            try:
                return f"not refused: {pool.apply_async(fork_fresh, (3,)).get(60)}"
            except jaxguard.JaxguardError as error:
                return f"JaxguardError: {error}"

    assert "ancestor" in trial()
    monkeypatch.setenv("USER_A", "changed, so that a warm worker gets a new environment")
    assert "ancestor" in trial()


def test_joblib_inside_a_trial_is_refused_at_once(
    fresh_guard: Callable[..., Any], slots: Callable[[int], None]
) -> None:
    """joblib's processes inside a trial do not queue up behind the trial that waits for them."""
    slots(2)

    @fresh_guard(timeout=90)
    def trial() -> Any:
        guarded = jaxguard.isolated_jax_worker(triangle)
        calls = (joblib.delayed(guarded)(n) for n in range(2))
        return joblib.Parallel(n_jobs=2, backend="loky")(calls)

    with pytest.raises(jaxguard.JaxguardError) as caught:
        trial()

    assert not isinstance(caught.value, (jaxguard.WorkerTimeout, jaxguard.WorkerDied, jaxguard.SlotTimeout))
    assert all_slots_are_free()


def test_a_trial_may_use_processes_of_its_own(guard: Callable[..., Any]) -> None:
    """Data-loader pools and subprocesses work inside a trial, after JAX has started there too."""

    @guard
    def trial() -> tuple[list[float], str, int]:
        triangle(2)
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            roots = pool.map(math.sqrt, [1.0, 4.0, 9.0])
        echo = subprocess.run(["/bin/echo", "hello"], capture_output=True, text=True, timeout=30, check=True)
        return roots, echo.stdout, triangle(3)[0]

    assert trial() == ([1.0, 2.0, 3.0], "hello\n", 6)


# ---------------------------------------------------------------- forks


def test_forked_children(run_python: Callable[..., Any], slots: Callable[[int], None]) -> None:
    """Before JAX started a forked child may do all; after it, only call guarded functions."""
    slots(2)
    code = textwrap.dedent("""
        import multiprocessing
        import os
        import warnings

        import jax
        import jax.numpy as jnp

        import jaxguard

        warnings.simplefilter("ignore")  # JAX and Python warn about the fork, which is the point here
        context = multiprocessing.get_context("fork")

        @jaxguard.isolated_jax_worker
        def triangle(n):
            return int(jnp.arange(n + 1).sum())

        @jaxguard.isolated_jax_worker(reuse=True)
        def warm(n):
            return int(jnp.arange(n + 1).sum())

        step = jaxguard.trial_jit(lambda x: x + 1)

        def tell(name, function):
            try:
                print(name, function(), flush=True)
            except BaseException as error:
                print(name, type(error).__name__, "isolated_jax_worker" in str(error), flush=True)

        def slot():
            with jaxguard.gpu_slot(slot_timeout=30) as held:
                return len(held.devices)

        def child():
            tell("guarded", lambda: triangle(3))
            tell("warm", lambda: warm(3))
            tell("slot", slot)
            tell("trial_jit", lambda: int(step(1)))

        def in_os_fork():
            pid = os.fork()
            if not pid:
                try:
                    child()
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)

        def in_a_process():
            process = context.Process(target=child)
            process.start()
            process.join(60)
            print("exit code", process.exitcode, flush=True)

        print("-- before, after a guarded call", flush=True)
        triangle(1)
        in_os_fork()
        print("-- after", flush=True)
        jnp.ones(3).sum().block_until_ready()
        tell("parent", lambda: triangle(3))
        in_os_fork()
        print("-- after, in a process", flush=True)
        in_a_process()
    """)

    done = run_python(code).check()

    good = ["guarded 6", "warm 6", "slot 1", "trial_jit 2"]
    refused = ["guarded 6", "warm 6", "slot ForkedAfterJax True", "trial_jit ForkedAfterJax True"]
    assert done.stdout.splitlines() == [
        "-- before, after a guarded call",
        *good,
        "-- after",
        "parent 6",
        *refused,
        "-- after, in a process",
        *refused,
        "exit code 0",
    ]


def test_a_forked_pool_after_jax_started(run_python: Callable[..., Any]) -> None:
    """The ordinary hang: an operation in the parent, then a forked pool that jits. Guarded, it just works."""
    code = textwrap.dedent("""
        import multiprocessing
        import warnings

        import jax
        import jax.numpy as jnp

        from jaxguard import isolated_jax_worker

        warnings.simplefilter("ignore")

        @isolated_jax_worker
        def fit(seed):
            step = jax.jit(lambda x: (x * x).sum())
            return float(step(jnp.arange(seed + 1.0)))

        jnp.ones(3).sum().block_until_ready()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map_async(fit, range(4), chunksize=1).get(60))
    """)

    assert run_python(code).check().stdout.splitlines() == ["[0.0, 1.0, 5.0, 14.0]"]
