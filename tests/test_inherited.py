"""What the parent had set is in force in the worker, except what comes from its slot."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import sys
import textwrap
import threading
import uuid
import warnings
from typing import TYPE_CHECKING, Any

import joblib
import pytest

import jaxguard

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

LISTENED = "user.trial"


# ---------------------------------------------------------------- environment and Python's state


def test_the_environment_at_the_call(guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker, also a warm one, sees the environment as it is at the call; `env=` overrides and unsets."""
    read = guard(lambda: {name: os.environ.get(name) for name in ("USER_A", "USER_B", "USER_C")})
    monkeypatch.setenv("USER_A", "1")
    monkeypatch.setenv("USER_B", "1")

    assert read() == {"USER_A": "1", "USER_B": "1", "USER_C": None}

    monkeypatch.setenv("USER_A", "2")
    monkeypatch.delenv("USER_B")
    assert read() == {"USER_A": "2", "USER_B": None, "USER_C": None}

    read = guard(
        lambda: {name: os.environ.get(name) for name in ("USER_A", "USER_B", "USER_C")},
        env={"USER_A": None, "USER_B": "3", "USER_C": ""},
    )
    assert read() == {"USER_A": None, "USER_B": "3", "USER_C": ""}
    assert (os.environ["USER_A"], "USER_B" in os.environ) == ("2", False), "the parent's own is as it was"


def test_native_code_sees_the_environment(guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`getenv` of the C library and child processes see what `os.environ` shows."""
    monkeypatch.setenv("USER_A", "of the parent")

    @guard(env={"USER_B": "of the guard"})
    def read() -> tuple[Any, str]:
        import ctypes
        import subprocess

        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        shell = subprocess.run(
            ["/bin/sh", "-c", "echo $USER_A, $USER_B"], capture_output=True, text=True, timeout=30, check=True
        )
        return (getenv(b"USER_A"), getenv(b"USER_B")), shell.stdout

    assert read() == ((b"of the parent", b"of the guard"), "of the parent, of the guard\n")


def test_the_environment_comes_before_imports(
    guard: Callable[..., Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`env=` is in force when a user's module is imported, though the parent had imported it without."""
    name = f"user_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(
        "import os\nFLAVOUR = os.environ.get('FLAVOUR')\ndef taste():\n    return FLAVOUR\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    user = importlib.import_module(name)

    assert user.taste() is None
    assert guard(user.taste, env={"FLAVOUR": "vanilla"})() == "vanilla"
    assert guard(user.taste, env={"FLAVOUR": "mint"})() == "mint"


def test_directory_path_and_arguments(
    guard: Callable[..., Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Working directory, `sys.path` and `sys.argv` are the parent's at the call."""
    read = guard(lambda: (os.getcwd(), list(sys.path), list(sys.argv)))

    for name in ("one", "two"):
        place = tmp_path / name
        place.mkdir()
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "path", [*sys.path, f"/nowhere/{name}"])
        monkeypatch.setattr(sys, "argv", ["tune.py", name])
        assert read() == (str(place), sys.path, ["tune.py", name])


def test_jax_settings_changed_by_hand(guard: Callable[..., Any]) -> None:
    """What `jax.config.update` changed holds in the worker, and what it changed back too."""
    import jax

    @guard
    def kind() -> tuple[str, bool]:
        import jax
        import jax.numpy as jnp

        return str(jnp.arange(3.0).dtype), jax.config.jax_debug_nans

    before = jax.config.jax_enable_x64
    try:
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_debug_nans", True)
        assert kind() == ("float64", True)
        jax.config.update("jax_enable_x64", False)
        assert kind() == ("float32", True)
    finally:
        jax.config.update("jax_enable_x64", before)
        jax.config.update("jax_debug_nans", False)


@pytest.fixture
def start_method() -> Iterator[Callable[[str], None]]:
    """Give a function that sets multiprocessing's start method for this test."""
    before = multiprocessing.get_start_method()
    yield lambda name: multiprocessing.set_start_method(name, force=True)
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(fresh_guard: Callable[..., Any], start_method: Callable[[str], None], method: str) -> None:
    """A worker looks like a program of its own, with the parent's start method."""
    start_method(method)

    @fresh_guard
    def look() -> tuple[Any, ...]:
        process = multiprocessing.current_process()
        return (
            multiprocessing.get_start_method(),
            process.name,
            process.daemon,
            multiprocessing.parent_process(),
            multiprocessing.active_children(),
            threading.current_thread() is threading.main_thread(),
        )

    assert look() == (method, "MainProcess", False, None, [], True)


def start_method_of_a_trial() -> tuple[str, int]:
    """Start a child the default way, from a worker."""
    with multiprocessing.Pool(1) as pool:
        return multiprocessing.get_start_method(), pool.apply(abs, (-3,))


@jaxguard.isolated_jax_worker
def guarded_start_method() -> tuple[str, int]:
    """Start a child the default way, in a worker."""
    return start_method_of_a_trial()


def test_multiprocessing_in_a_worker_of_loky() -> None:
    """loky calls its start method by a name that no grandchild knows; a trial there gets one that works."""
    ((method, value),) = joblib.Parallel(n_jobs=2, backend="loky")([joblib.delayed(guarded_start_method)()])

    assert method in multiprocessing.get_all_start_methods()
    assert value == 3


def test_no_two_fresh_workers_share_randomness(fresh_guard: Callable[..., Any]) -> None:
    """Global random states, temporary names and identifiers differ from call to call, as in fresh processes."""

    @fresh_guard
    def draw() -> tuple[Any, ...]:
        import random
        import secrets
        import tempfile

        import numpy as np

        with tempfile.NamedTemporaryFile() as file:
            name = file.name
        return (
            float(np.random.rand()),  # noqa: NPY002
            int(np.random.default_rng().integers(1 << 60)),
            random.random(),
            name,
            uuid.uuid4().hex,
            secrets.token_hex(8),
        )

    first, second = draw(), draw()

    assert not set(first) & set(second)


# ---------------------------------------------------------------- logging and warnings


def test_log_records_reach_the_parents_handlers(guard: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """A record keeps logger, level, text, place and process; exceptions come as text; levels are the parent's."""

    @guard
    def talk() -> int:
        logger = logging.getLogger(LISTENED)
        logger.debug("not wanted")
        logger.info("loss %.2f", 0.5)
        logger.warning("odd %s", threading.Lock(), extra={"step": 3})
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            logger.exception("it failed")
        logging.getLogger().error("from the root")
        return os.getpid()

    with caplog.at_level(logging.INFO, LISTENED):
        pid = talk()

    records = [record for record in caplog.records if record.process == pid]
    assert [(record.name, record.levelname) for record in records] == [
        (LISTENED, "INFO"),
        (LISTENED, "WARNING"),
        (LISTENED, "ERROR"),
        ("root", "ERROR"),
    ]
    assert records[0].getMessage() == "loss 0.50"
    assert records[0].filename == os.path.basename(__file__)
    assert records[0].funcName == "talk"
    assert "odd <unlocked _thread.lock" in records[1].getMessage()
    assert records[1].step == 3
    assert "ZeroDivisionError" in logging.Formatter().format(records[2])


def test_loggers_are_the_parents(guard: Callable[..., Any]) -> None:
    """Handlers, levels and `propagate` of the parent decide what happens to a record, at each call anew."""
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    @guard
    def talk(word: str) -> list[bool]:
        logger = logging.getLogger(f"{LISTENED}.{word}")
        logger.info(word)
        return [logger.isEnabledFor(level) for level in (logging.DEBUG, logging.INFO)]

    parent, handler = logging.getLogger(LISTENED), Keep()
    parent.addHandler(handler)
    parent.propagate = False
    try:
        parent.setLevel(logging.INFO)
        assert talk("one") == [False, True]
        parent.setLevel(logging.WARNING)
        assert talk("two") == [False, False]
        parent.setLevel(logging.DEBUG)
        assert talk("three") == [True, True]
    finally:
        parent.removeHandler(handler)
        parent.propagate = True
        parent.setLevel(logging.NOTSET)

    assert seen == ["one", "three"]


def test_a_record_is_printed_once(run_python: Callable[..., Any]) -> None:
    """With `logging.basicConfig` in a script, a worker's record is printed once and in the script's format."""
    code = textwrap.dedent("""
        import logging
        from jaxguard import isolated_jax_worker

        logging.basicConfig(format="%(name)s|%(levelname)s|%(message)s", level=logging.INFO)

        @isolated_jax_worker
        def fresh():
            logging.getLogger("mine").info("from a fresh worker")

        @isolated_jax_worker(reuse=True)
        def warm():
            logging.getLogger("mine").info("from a warm worker")

        fresh()
        warm()
        warm()
    """)

    lines = [line for line in run_python(code).check().stderr.splitlines() if line.startswith("mine")]

    assert lines == ["mine|INFO|from a fresh worker", *["mine|INFO|from a warm worker"] * 2]


def test_warnings_filters(guard: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """The parent's filters at the call decide in the worker: raise, or ignore, or show, and that in the parent."""

    class MyWarning(UserWarning):
        pass

    @guard
    def warn() -> str:
        warnings.warn("careful now", MyWarning, stacklevel=2)
        return "returned"

    with warnings.catch_warnings():
        warnings.simplefilter("error", MyWarning)
        with pytest.raises(MyWarning, match="careful now"):
            warn()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        capfd.readouterr()
        assert warn() == "returned"
        assert "careful" not in "".join(capfd.readouterr())
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", message="careful")
        warnings.filterwarnings("always", category=MyWarning, append=True)
        assert warn() == "returned"
        assert "careful" not in "".join(capfd.readouterr())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert warn() == "returned"
    assert [(w.category.__name__, str(w.message)) for w in caught] == [("MyWarning", "careful now")]


# ---------------------------------------------------------------- what comes from the slot


def test_the_platform_comes_from_the_slot(guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the parent's environment says, a worker with a CPU slot runs on the CPU, with `gpus` devices."""
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "7")

    @guard
    def look() -> tuple[str, int, str | None]:
        import jax

        return jax.default_backend(), jax.device_count(), os.environ.get("JAX_PLATFORMS")

    assert look() == ("cpu", 1, "cpu")


@pytest.mark.parametrize(("gpus", "devices"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_as_many_devices_as_asked_for(fresh_guard: Callable[..., Any], gpus: int, devices: int) -> None:
    """`gpus=n` gives n CPU devices, also more than there are slots; an array can be sharded over them."""

    @fresh_guard(gpus=gpus)
    def shard() -> tuple[int, int, float]:
        import jax
        import jax.numpy as jnp
        import numpy as np

        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        array = jax.device_put(jnp.arange(6.0), sharding)
        return jax.device_count(), len(array.sharding.device_set), float(array.sum())

    assert shard() == (devices, devices, 15.0)


def test_two_devices_by_exec() -> None:
    """The number of devices holds for workers that exec, too."""

    @jaxguard.isolated_jax_worker(gpus=2, env={"OMP_DYNAMIC": "FALSE"})
    def count() -> int:
        import jax

        return jax.device_count()

    assert count() == 2


def test_a_module_that_starts_jax_when_imported(run_python: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """Work at import is harmless in the worker: the devices are in force before the job is read."""
    (tmp_path / "eager.py").write_text(
        textwrap.dedent("""
            import jax.numpy as jnp
            import jax

            TABLE = jnp.ones(3)

            def look(array):
                return jax.device_count(), float(TABLE.sum() + array.sum())
        """)
    )
    code = textwrap.dedent("""
        import jax
        import eager
        from jaxguard import isolated_jax_worker

        print(jax.device_count())
        for reuse in False, True:
            print(isolated_jax_worker(eager.look, gpus=2, reuse=reuse)(eager.TABLE))
    """)

    done = run_python(code, env={"JAX_NUM_CPU_DEVICES": None}).check()

    assert done.stdout.splitlines() == ["1", "(2, 6.0)", "(2, 6.0)"]


def cores_in_use(place: str, me: int) -> tuple[list[int], dict[str, str | None]]:
    """Give this worker's cores and thread variables, while another worker is surely there."""
    import pathlib
    import time

    (pathlib.Path(place) / f"here-{me}").touch()
    deadline = time.monotonic() + 60
    while not (pathlib.Path(place) / f"here-{1 - me}").exists():
        if time.monotonic() > deadline:
            message = "the other worker never came"
            raise TimeoutError(message)
        time.sleep(0.005)
    names = ("PJRT_NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return sorted(os.sched_getaffinity(0)), {name: os.environ.get(name) for name in names}


def test_slots_share_the_cores(
    guard: Callable[..., Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots have half of the cores each, not the same, and threads for as many."""
    for name in ("PJRT_NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    mine = sorted(os.sched_getaffinity(0))
    guarded = guard(cores_in_use)

    calls = (joblib.delayed(guarded)(str(tmp_path), me) for me in range(2))
    (first, variables), (second, others) = joblib.Parallel(n_jobs=2, backend="threading")(calls)

    share = max(1, len(mine) // 2)
    assert set(first) | set(second) <= set(mine)
    if len(mine) > 1:
        assert not set(first) & set(second)
        assert {len(first), len(second)} <= {share, share + 1}
    assert variables["PJRT_NPROC"] == str(len(first))
    assert others["PJRT_NPROC"] == str(len(second))
    for found in (variables, others):
        assert {value for name, value in found.items() if name != "PJRT_NPROC"} == {str(share)}
    assert sorted(os.sched_getaffinity(0)) == mine, "the parent keeps all its cores"


def test_numbers_of_threads_of_ones_own_win(fresh_guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user set, in the environment or by `env=`, is not replaced."""

    def read() -> tuple[str | None, str | None]:
        return os.environ.get("OMP_NUM_THREADS"), os.environ.get("PJRT_NPROC")

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PJRT_NPROC", "3")
    assert fresh_guard(read)() == ("7", "3")
    assert fresh_guard(read, env={"OMP_NUM_THREADS": "5", "PJRT_NPROC": "2"})() == ("5", "2")
