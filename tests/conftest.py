"""Fixtures that every test file shares: slots of one's own, the ways to start a worker, scripts, patience."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any

import phases
import pytest

import jaxguard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# A variable that JAX or BLAS reads at import and that no forked worker can have: it forces the exec way.
EXEC_ENV = {"OMP_DYNAMIC": "FALSE"}
PLACE = str(pathlib.Path(jaxguard.__file__).resolve().parents[1])
TRACKERS = ("resource_tracker", "semaphore_tracker")


@dataclasses.dataclass(frozen=True)
class Guard:
    """`isolated_jax_worker` with the start way and `reuse` of this test filled in."""

    way: str
    reuse: bool

    def __call__(self, function: Any = None, /, **options: Any) -> Any:
        """Decorate `function`, or give the decorator and context manager, like the real one."""
        options = {"reuse": self.reuse, **options}
        if self.way == "exec":
            options["env"] = {**EXEC_ENV, **(options.get("env") or {})}
        if function is None:
            return jaxguard.isolated_jax_worker(**options)
        return jaxguard.isolated_jax_worker(function, **options)


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a script left behind."""

    stdout: str
    stderr: str
    returncode: int

    def check(self) -> Finished:
        """Fail with all that the script said unless it ended with 0."""
        assert self.returncode == 0, (
            f"exit code {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )
        return self


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the tests on a GPU one at a time: what one puts on the card is foreign to another."""
    if config.getoption("markexpr") == "gpu" and hasattr(config.option, "numprocesses"):
        config.option.numprocesses = 0


# Rooms in which it matters that a worker both execs and is fresh. In the others exec is tried warm, and fresh forked.
ALL_WAYS = {"test_deaths", "test_ending", "test_endings", "test_inherited", "test_keeper", "test_phases", "test_places"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave one of the four ways to start a worker out where it tries nothing that the other three do not try."""
    out = {
        item
        for item in items
        if getattr(item, "callspec", None) is not None
        and item.callspec.params.get("guard") == "exec-fresh"  # type: ignore[attr-defined]
        and item.path.stem not in ALL_WAYS
    }
    config.hook.pytest_deselected(items=list(out))
    items[:] = [item for item in items if item not in out]


def pytest_configure() -> None:
    """Let Ctrl-C be heard by what the tests start: a shell ignores it in the name of its background jobs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def store_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """Keep the compiled programs of the tests apart from those of the user, and show where."""
    path = (
        tmp_path_factory.getbasetemp().parent / "programs"
        if "PYTEST_XDIST_WORKER" in os.environ
        else tmp_path_factory.mktemp("programs")
    )
    before = os.environ.get("JAXGUARD_CACHE_DIR")
    os.environ["JAXGUARD_CACHE_DIR"] = str(path)
    yield path
    if before is None:
        del os.environ["JAXGUARD_CACHE_DIR"]
    else:
        os.environ["JAXGUARD_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def slots(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give the test two CPU slots in a namespace of its own; `slots(n)` asks for another number."""
    name = f"test{uuid.uuid4().hex[:12]}"

    def set_slots(number: int) -> None:
        monkeypatch.setenv("JAXGUARD_DEVICES", f"cpu:{number}@{name}")

    for setting in ("JAXGUARD_INLINE", "JAXGUARD_DIR", "JAXGUARD_ALLOW_FOREIGN"):
        monkeypatch.delenv(setting, raising=False)
    set_slots(2)
    return set_slots


@pytest.fixture(params=["fork-fresh", "fork-warm", "exec-fresh", "exec-warm"])
def guard(request: pytest.FixtureRequest) -> Guard:
    """Give `isolated_jax_worker` once for each start way and each `reuse`."""
    way, _, kept = request.param.partition("-")
    return Guard(way=way, reuse=kept == "warm")


@pytest.fixture
def fresh_guard() -> Guard:
    """Give `isolated_jax_worker` in its cheapest form, where the four forms would cost too much."""
    return Guard(way="fork", reuse=False)


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Give a function that waits for a condition, with a bound, and says what it waited for."""

    def wait(condition: Callable[[], object], what: str, *, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"waited {timeout} s in vain: {what}")
            time.sleep(0.01)

    return wait


@pytest.fixture
def run_python(tmp_path: pathlib.Path) -> Callable[..., Finished]:
    """Give a function that runs `code` in a Python of its own and returns what it printed and how it ended."""
    # A script does not see what pytest put on sys.path, so the package's place travels by PYTHONPATH.
    place = str(pathlib.Path(jaxguard.__file__).resolve().parents[1])

    def run(
        code: str,
        *,
        args: Sequence[str] = (),
        how: str = "file",
        env: dict[str, str | None] | None = None,
        cwd: pathlib.Path | None = None,
        timeout: float = 90.0,
    ) -> Finished:
        """`how`: "file", "-c" or "stdin"; a None in `env` unsets."""
        script = tmp_path / f"script_{uuid.uuid4().hex[:8]}.py"
        script.write_text(code, encoding="utf-8")
        command = [sys.executable, *{"file": [str(script)], "-c": ["-c", code], "stdin": ["-"]}[how], *args]
        merged = {**os.environ, **(env or {})}
        path = [place, *filter(None, [merged.get("PYTHONPATH")])]
        merged["PYTHONPATH"] = os.pathsep.join(path)
        # Files, not pipes: a process that outlives the script would keep a pipe open and hang the test.
        out, err = script.with_suffix(".out"), script.with_suffix(".err")
        with out.open("wb") as o, err.open("wb") as e, script.open("rb") as i:
            process = subprocess.Popen(
                command,
                stdin=i if how == "stdin" else subprocess.DEVNULL,
                stdout=o,
                stderr=e,
                env={k: v for k, v in merged.items() if v is not None},
                cwd=cwd or tmp_path,
                start_new_session=True,
            )
            try:
                process.wait(timeout)
                late = False
            except subprocess.TimeoutExpired:
                late = True
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(30)
        done = Finished(
            out.read_text("utf-8", errors="replace"), err.read_text("utf-8", errors="replace"), process.returncode
        )
        if late:
            pytest.fail(f"the script ran longer than {timeout} s\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}")
        return done

    return run


@pytest.fixture
def staying(tmp_path: pathlib.Path, wait_until: Callable[..., None]) -> Any:
    """Give a function that makes a guarded call stay in a phase, and is there when it is."""
    callers: list[phases.Caller] = []

    def stay(phase: str, **options: Any) -> phases.Caller:
        folder = tmp_path / f"call{len(callers)}"
        folder.mkdir()
        caller = phases.Caller(phase, folder, **options)
        callers.append(caller)
        wait_until(lambda: caller.worker or caller.error, f"a call in the phase {phase}")
        wait_until(
            lambda: caller.told().startswith(phases.WORDS[phase]) or caller.error,
            f"it says so; it says {caller.told()}",
        )
        assert caller.error is None
        return caller

    yield stay
    for caller in callers:
        caller.go_on()
        assert not caller.is_alive()


@pytest.fixture
def memory_group(wait_until: Callable[..., None]) -> Iterator[pathlib.Path]:
    """Give a control group of the test's own, which counts memory; needs the right to make one."""
    rows = [row.split(":", 2) for row in pathlib.Path("/proc/self/cgroup").read_text().splitlines()]
    v1 = next((path for _, names, path in rows if "memory" in names.split(",")), None)
    v2 = next((path for _, names, path in rows if not names), None)
    base = f"/sys/fs/cgroup/memory{v1}" if v1 is not None else f"/sys/fs/cgroup{v2}"
    group = pathlib.Path(base, f"jaxguard-test-{uuid.uuid4().hex[:8]}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    if not list(group.glob("memory.*events")) + list(group.glob("memory.oom_control")):
        group.rmdir()
        pytest.skip("control groups do not count memory here")
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text(), "all its processes are gone")
    group.rmdir()


def _processes() -> dict[int, tuple[int, str, str]]:
    """Read pid -> (parent, state, command line) of every process from /proc."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:  # it ended while we read
                continue
            found[int(entry.name)] = (int(parent), state, command)
    return found


def left_over_processes(pid: int | None = None) -> list[str]:
    """Describe the descendants of `pid` that should be gone: all but resource trackers and one idle keeper."""
    pid = pid or os.getpid()
    table = _processes()
    family, todo = set(), [pid]
    while todo:
        parent = todo.pop()
        children = {p for p, (its_parent, _, _) in table.items() if its_parent == parent}
        todo.extend(children - family)
        family |= children
    rest = {p for p in family if not any(word in table[p][2] for word in TRACKERS)}
    # The keeper is a child that loky started, and without workers it has no children.
    keepers = [
        p for p in rest if table[p][0] == pid and "loky" in table[p][2] and not any(table[c][0] == p for c in rest)
    ]
    rest -= set(keepers[:1])
    return [f"pid {p}, parent {table[p][0]}, state {table[p][1]}: {table[p][2] or '(no command line)'}" for p in rest]


def open_listeners() -> list[str]:
    """Name the listening abstract sockets of jaxguard that this process has open."""
    mine = set()
    for fd in pathlib.Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(fd))
        except OSError:  # closed while we read
            continue
    listening = "00010000"
    names = []
    for line in pathlib.Path("/proc/net/unix").read_text(errors="replace").splitlines():
        fields = line.split()
        if len(fields) > 7 and fields[3] == listening and fields[7].startswith("@jaxguard"):
            names.extend([fields[7]] if f"socket:[{fields[6]}]" in mine else [])
    return names


@pytest.fixture
def left_overs() -> Callable[..., list[str]]:
    """Give a function that lists what a process (this one by default) left running."""
    return left_over_processes


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hold the whole run to what each guard promises: no process and no socket outlives its use."""
    yield
    if "joblib" in sys.modules:  # joblib keeps its own idle workers for minutes
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor(reuse=True).shutdown(wait=True)
    # A warm worker may stay for some idle seconds.
    deadline = time.monotonic() + 20
    while (left := left_over_processes() + open_listeners()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "the test run left behind:\n" + "\n".join(left)


NOBODY = 65534
# What another user may have no right to read, it imports before it becomes that user.
BECOME = f"""
import datetime, importlib, json, logging, os, pkgutil, pwd, signal, sys, threading, time
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import host, jaxguard, phases
for module in pkgutil.iter_modules(jaxguard.__path__):
    if module.name not in {{"__main__", "pytest_plugin", "_demo"}}:
        importlib.import_module("jaxguard." + module.name)
from jaxguard import *
"x".encode("ascii"); print(end="")
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
"""


@pytest.fixture
def open_to_all() -> Callable[[pathlib.Path], None]:
    """Let another user reach a folder: pytest's own are closed to all but this one."""

    def open_up(folder: pathlib.Path) -> None:
        for part in (folder, *folder.parents):
            if part.stat().st_uid == os.getuid() and not part.stat().st_mode & 0o001:
                part.chmod(part.stat().st_mode | 0o055)

    return open_up


@pytest.fixture
def as_nobody() -> Callable[..., list[str]]:
    """Run code as another user, and give its lines; needs the right to become one."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")

    def run(code: str, *args: str, **env: str) -> list[str]:
        given = {**os.environ, "PYTHONPATH": PLACE, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", **env}
        done = subprocess.run(
            [sys.executable, "-c", BECOME + code, *args], env=given, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run
