"""How a call ends: normally, early, or with its parent; the slot is free and nobody is left."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

import joblib
import optuna
import pytest

import jaxguard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IGNORE_FORK_WARNINGS = pytest.mark.filterwarnings("ignore:.*fork.*")


def state_of(pid: int) -> str:
    """Give the state of a process as one letter, or an empty text if it is gone or only waits to be reaped."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if state in "ZX" else state


def next_call_works(slots: Callable[[int], None], guard: Callable[..., Any] = jaxguard.isolated_jax_worker) -> bool:
    """Say whether another call gets the only slot and its answer."""
    slots(1)
    return bool(guard(os.getpid, slot_timeout=30)() != os.getpid())


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Give a function that starts a script and returns its process; what it prints is in `script.log`."""
    place = pathlib.Path(jaxguard.__file__).resolve().parents[1]
    started: list[subprocess.Popen[bytes]] = []

    def run(code: str, *arguments: object) -> subprocess.Popen[bytes]:
        script = tmp_path / f"script_{uuid.uuid4().hex[:8]}.py"
        script.write_text(textwrap.dedent(code))
        with (tmp_path / "script.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])},
                start_new_session=True,
            )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(30)


def pids_in(folder: pathlib.Path) -> dict[str, int]:
    """Read the files in which processes of a test wrote their pids."""
    found = {}
    for path in folder.glob("*.pid"):
        text = path.read_text().strip()
        if text.isdigit():
            found[path.stem] = int(text)
    return found


# ---------------------------------------------------------------- a normal end


def test_a_worker_ends_as_a_program_ends(guard: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """Threads that are no daemons are waited for, then atexit handlers run, then logging is flushed: in each mode."""
    diary = tmp_path / "diary"

    def work() -> str:
        import atexit
        import concurrent.futures
        import logging
        import logging.handlers
        import weakref

        def note(word: str) -> None:
            with diary.open("a") as file:
                file.write(word + "\n")

        class Checkpointer:
            pass

        def slowly() -> None:
            time.sleep(0.2)
            note("thread")

        atexit.register(note, "atexit 1")
        atexit.register(note, "atexit 2")
        atexit.register(logging.getLogger("lib").info, "late record")
        checkpointer = Checkpointer()
        weakref.finalize(checkpointer, note, "finalizer").atexit = True
        sys.modules["kept_for_ever"] = checkpointer  # type: ignore[assignment]
        target = logging.FileHandler(tmp_path / "log")
        logging.getLogger("mine").addHandler(logging.handlers.MemoryHandler(1000, target=target))
        logging.getLogger("mine").error("a buffered record")
        threading.Thread(target=slowly).start()
        concurrent.futures.ThreadPoolExecutor(1).submit(slowly)
        return "value"

    with guard() as worker:
        assert worker(work) == "value"

    words = diary.read_text().split("\n")[:-1]
    assert sorted(words[:2]) == ["thread", "thread"], words
    assert "finalizer" in words
    assert words.index("atexit 2") < words.index("atexit 1")
    assert (tmp_path / "log").read_text() == "a buffered record\n"


def test_a_plain_fresh_call_waits_for_the_end(fresh_guard: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """A fresh call returns after its process has ended, so what its handlers write is there."""
    path = tmp_path / "checkpoint"

    @fresh_guard
    def work() -> int:
        import atexit

        atexit.register(path.write_text, "saved")
        return os.getpid()

    pid = work()

    assert path.read_text() == "saved"
    assert not state_of(pid)


def test_the_end_of_a_program_ends_its_warm_workers(run_python: Callable[..., Any]) -> None:
    """Warm workers end normally with the program, also when an exception ends it."""
    code = textwrap.dedent("""
        import sys
        from jaxguard import isolated_jax_worker

        @isolated_jax_worker(reuse=True)
        def work(path):
            import atexit, os
            atexit.register(lambda: open(path, "w").write("saved"))
            return os.getpid()

        print(work(sys.argv[1]))
        if "raise" in sys.argv:
            raise RuntimeError("on purpose")
    """)
    for word, exit_code in (("return", 0), ("raise", 1)):
        path = pathlib.Path(f"{uuid.uuid4().hex}")
        done = run_python(code, args=[str(path), word])
        assert done.returncode == exit_code, done.stderr
        assert not state_of(int(done.stdout))


# ---------------------------------------------------------------- deaths


def test_a_killed_worker(guard: Callable[..., Any], slots: Callable[[int], None]) -> None:
    """The error tells the signal, the likely cause and the last lines; only that call fails; the slot is free."""
    slots(1)

    @guard
    def objective(number: int) -> int:
        if number == 1:
            print("last words", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(jaxguard.WorkerDied) as caught:
        objective(1)

    assert caught.value.signal == signal.SIGKILL
    assert caught.value.exit_code is None
    assert caught.value.pid not in (None, os.getpid())
    assert "last words" in caught.value.output
    for word in ("SIGKILL", "memory", "last words", "objective", str(caught.value.pid)):
        assert word in str(caught.value)
    assert objective(2) == 2


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    ("end", "field", "value", "word"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "signal", signal.SIGSEGV, "SIGSEGV"),
        (os.abort, "signal", signal.SIGABRT, "SIGABRT"),
        (lambda: os._exit(3), "exit_code", 3, "3"),
        (lambda: sys.exit(4), "exit_code", 4, "4"),
        (lambda: sys.exit("a reason"), "exit_code", 1, "a reason"),
        (sys.exit, "exit_code", 0, "0"),
    ],
    ids=["segfault", "abort", "os._exit", "sys.exit", "sys.exit with a text", "sys.exit of nothing"],
)
def test_other_deaths(
    slots: Callable[[int], None],
    end: Callable[[], None],
    field: str,
    value: int,
    word: str,
    reuse: bool,  # noqa: FBT001
) -> None:
    """However a worker ends itself, the caller gets `WorkerDied` with how; the slot is free again."""
    slots(1)

    @jaxguard.isolated_jax_worker(reuse=reuse)
    def my_objective() -> None:
        end()

    with pytest.raises(jaxguard.WorkerDied) as caught:
        my_objective()

    assert getattr(caught.value, field) == value
    assert word in str(caught.value)
    assert "my_objective" in str(caught.value)
    assert next_call_works(slots)


def test_death_while_the_job_is_read(fresh_guard: Callable[..., Any], slots: Callable[[int], None]) -> None:
    """A worker that dies before the function runs is a dead worker like any other."""

    class Deadly:
        def __reduce__(self) -> Any:
            return os._exit, (5,)

    with pytest.raises(jaxguard.WorkerDied) as caught:
        fresh_guard(lambda thing: thing)(Deadly())

    assert caught.value.exit_code == 5
    assert next_call_works(slots)


def test_only_that_trial_fails(guard: Callable[..., Any]) -> None:
    """In a study with `catch=`, a killed worker is one failed trial; the others complete, no trial stays RUNNING."""

    @guard
    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        if trial.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    study = optuna.create_study()
    study.optimize(objective, n_trials=4, n_jobs=2, catch=(jaxguard.WorkerDied,))

    states = {trial.number: trial.state.name for trial in study.trials}
    assert states == {0: "COMPLETE", 1: "FAIL", 2: "COMPLETE", 3: "COMPLETE"}


def test_one_death_under_joblib(fresh_guard: Callable[..., Any]) -> None:
    """One killed call does not take the results of others away."""

    @fresh_guard
    def work(number: int) -> int:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    def tolerant(number: int) -> int | str:
        try:
            return work(number)
        except jaxguard.WorkerDied as error:
            return error.signal or "?"

    calls = (joblib.delayed(tolerant)(number) for number in range(5))

    assert joblib.Parallel(n_jobs=2, backend="loky")(calls) == [0, 1, signal.SIGKILL, 3, 4]


# ---------------------------------------------------------------- time out


def in_c_with_the_lock() -> None:
    """Stay for ever in one C call that neither lets the interpreter's lock go nor looks for signals."""
    import collections
    import itertools

    collections.deque(itertools.repeat(0), maxlen=0)


def in_python_in_two_threads() -> None:
    """Wait for ever in two threads."""

    def stuck_in_a_thread() -> None:
        threading.Event().wait()

    threading.Thread(target=stuck_in_a_thread).start()
    threading.Event().wait()


def deaf() -> None:
    """Refuse to hear SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()


def in_xla() -> None:
    """Compute for ever."""
    import jax

    jax.jit(lambda x: jax.lax.while_loop(lambda x: x >= 0, lambda x: x * 0.5 + 1, x))(1.0).block_until_ready()


def asleep() -> None:
    """Sleep, and go on sleeping when a signal comes."""
    time.sleep(600)


def asleep_in_c() -> None:
    """Sleep in C code that comes back when any signal comes."""
    import ctypes

    ctypes.PyDLL(None).sleep(600)


def waiting_for_its_child() -> None:
    """Wait for a process of one's own, which waits too, in a session of its own."""
    subprocess.run(["sleep", "600"], start_new_session=True, check=False)


def sleeping_children() -> list[str]:
    """The processes that workers of this process have started and that still sleep."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if (
                b"sleep" in (process / "cmdline").read_bytes()
                and f"JAXGUARD_RUN={os.getpid()}-".encode() in (process / "environ").read_bytes()
            ):
                found.append(process.name)
        except OSError:  # it ended while we read
            continue
    return found


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    ("stuck", "words"),
    [
        (in_python_in_two_threads, ["in_python_in_two_threads", "stuck_in_a_thread"]),
        (in_c_with_the_lock, ["in_c_with_the_lock"]),
        (in_xla, ["in_xla"]),
        (asleep, ["asleep"]),
        (asleep_in_c, ["asleep_in_c"]),
        (waiting_for_its_child, ["waiting_for_its_child"]),
    ],
)
def test_a_call_that_takes_too_long(
    slots: Callable[[int], None],
    stuck: Callable[[], None],
    words: list[str],
    reuse: bool,  # noqa: FBT001
) -> None:
    """It is ended, the error names what each thread was doing, and the slot is free."""
    slots(1)
    guarded = jaxguard.isolated_jax_worker(stuck, timeout=2, reuse=reuse)
    began = time.monotonic()

    with pytest.raises(jaxguard.WorkerTimeout) as caught:
        guarded()

    assert isinstance(caught.value, TimeoutError)
    assert 2 <= time.monotonic() - began < 30
    assert caught.value.timeout_s == 2
    assert not state_of(caught.value.pid or 0)
    assert not sleeping_children()
    for word in words:
        assert word in caught.value.stacks
        assert word in str(caught.value)
    assert next_call_works(slots)


def test_a_timeout_by_exec() -> None:
    """A worker that execs is ended in the same way, with its stacks."""
    guarded = jaxguard.isolated_jax_worker(in_python_in_two_threads, timeout=6, env={"OMP_DYNAMIC": "FALSE"})

    with pytest.raises(jaxguard.WorkerTimeout, match="stuck_in_a_thread"):
        guarded()


def test_a_worker_that_will_not_hear(slots: Callable[[int], None]) -> None:
    """A function that ignores SIGTERM is killed some seconds later."""
    with pytest.raises(jaxguard.WorkerTimeout, match="deaf"):
        jaxguard.isolated_jax_worker(deaf, timeout=0.5)()

    assert next_call_works(slots)


def test_enough_time() -> None:
    """A limit that is not reached changes nothing, and counts anew for each call of a warm worker."""
    guarded = jaxguard.isolated_jax_worker(lambda: (time.sleep(1.2), os.getpid())[1], timeout=3, reuse=True)

    assert len({guarded() for _ in range(3)}) == 1


def test_a_trial_that_takes_too_long() -> None:
    """In a study, one trial over its limit fails and the study goes on."""

    @jaxguard.isolated_jax_worker(timeout=2)
    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        if trial.number == 0:
            threading.Event().wait()
        return x

    study = optuna.create_study()
    study.optimize(objective, n_trials=2, catch=(jaxguard.WorkerTimeout,))

    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]


# ---------------------------------------------------------------- what a trial leaves

LEAVE_CHILDREN = """
    import os, pathlib, subprocess, sys

    def leave_children(folder):
        def note(name, pid):
            path = pathlib.Path(folder) / name
            path.with_suffix(".part").write_text(str(pid))
            path.with_suffix(".part").rename(path.with_suffix(".pid"))

        note("worker", os.getpid())
        os.system(f"sleep 600 & echo $! > {folder}/system.pid")
        note("session", subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
        forked = os.fork()
        if not forked:
            os.setsid()
            if not os.fork():
                note("daemon", os.getpid())
                os.closerange(0, 3)
                os.execvp("sleep", ["sleep", "600"])
            os._exit(0)
        os.waitpid(forked, 0)
        while not (pathlib.Path(folder) / "daemon.pid").exists():
            os.sched_yield()
        return os.getpid()
"""
NAMES = {"worker", "system", "session", "daemon"}


def test_children_that_a_trial_leaves(
    guard: Callable[..., Any],
    slots: Callable[[int], None],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., None],
) -> None:
    """Background children, sessions and daemons of a trial delay nothing, keep no slot, and go with its worker."""
    slots(1)
    module = f"user_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(LEAVE_CHILDREN))
    monkeypatch.syspath_prepend(str(tmp_path))
    leave_children = __import__(module).leave_children
    began = time.monotonic()

    with guard() as worker:
        worker(leave_children, str(tmp_path))
    took = time.monotonic() - began

    assert took < 60, "nobody waits for the ten minutes of a grandchild"
    free = jaxguard.isolated_jax_worker(os.getpid, slot_timeout=0)()
    assert free, "the slot was free as soon as the block ended"
    pids = pids_in(tmp_path)
    assert set(pids) == NAMES
    wait_until(lambda: not any(map(state_of, pids.values())), f"the end of {pids}", timeout=10)


@pytest.mark.parametrize(
    ("busy", "reuse"),
    [
        ("threading.Event().wait()", False),
        ("threading.Event().wait()", True),
        ("__import__('collections').deque(iter(int, 1), maxlen=0)", False),
    ],
    ids=["fresh", "warm", "in C with the interpreter's lock"],
)
def test_the_death_of_the_parent(
    start: Callable[..., subprocess.Popen[bytes]],
    slots: Callable[[int], None],
    tmp_path: pathlib.Path,
    wait_until: Callable[..., None],
    busy: str,
    reuse: bool,  # noqa: FBT001
) -> None:
    """After SIGKILL of the parent no worker and no grandchild is left, and the slot is free."""
    slots(1)
    code = textwrap.dedent(LEAVE_CHILDREN) + textwrap.dedent("""
        import threading
        from jaxguard import isolated_jax_worker

        @isolated_jax_worker(reuse=REUSE)
        def work(folder):
            leave_children(folder)
            (pathlib.Path(folder) / "busy").touch()
            BUSY

        work(sys.argv[1])
    """).replace("REUSE", str(reuse)).replace("BUSY", busy)
    parent = start(code, tmp_path)
    wait_until(
        lambda: (tmp_path / "busy").exists() or parent.poll() is not None,
        f"the script to be busy: {tmp_path / 'script.log'}",
        timeout=60,
    )
    pids = pids_in(tmp_path)
    assert set(pids) == NAMES, (tmp_path / "script.log").read_text()
    children = {int(p.name) for p in pathlib.Path("/proc").iterdir() if p.name.isdigit() and parent_of(p) == parent.pid}

    parent.kill()
    parent.wait(30)

    everyone = {*pids.values(), *children}
    wait_until(lambda: not any(map(state_of, everyone)), f"the end of {pids} and {children}", timeout=10)
    assert jaxguard.isolated_jax_worker(os.getpid, slot_timeout=5)()


def parent_of(process: pathlib.Path) -> int:
    """Give the parent of a process in /proc, 0 if it is gone."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


STUDY = """
    import signal
    import sys
    import time
    import optuna
    from jaxguard import isolated_jax_worker

    folder, n_jobs, handler = sys.argv[1], int(sys.argv[2]), sys.argv[3]

    def mine(number, frame):
        print("my own handler", number, flush=True)

    if handler == "own":
        signal.signal(signal.SIGTERM, mine)

    @isolated_jax_worker
    def objective(trial):
        import os, pathlib, threading
        x = trial.suggest_float("x", 0, 1)
        path = pathlib.Path(folder) / f"trial_{trial.number}"
        path.with_suffix(".part").write_text(str(os.getpid()))
        path.with_suffix(".part").rename(path.with_suffix(".pid"))
        threading.Event().wait()
        return x

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(storage=f"sqlite:///{folder}/study.db", study_name="study")
    study.optimize(objective, n_trials=10, n_jobs=n_jobs, catch=(Exception,))
"""


@pytest.mark.parametrize(
    ("number", "handler", "n_jobs"),
    [
        (signal.SIGTERM, "none", 1),
        (signal.SIGTERM, "none", 3),
        (signal.SIGTERM, "own", 3),
        (signal.SIGINT, "none", 1),
        (signal.SIGINT, "none", 3),
    ],
)
def test_a_study_that_is_told_to_stop(
    start: Callable[..., subprocess.Popen[bytes]],
    slots: Callable[[int], None],
    tmp_path: pathlib.Path,
    wait_until: Callable[..., None],
    number: signal.Signals,
    handler: str,
    n_jobs: int,
) -> None:
    """SIGTERM and Ctrl-C end the workers at once; every trial, also one that waits for a slot, is FAIL, not RUNNING."""
    slots(2)
    running = min(n_jobs, 2)
    parent = start(STUDY, tmp_path, n_jobs, handler)

    def all_run() -> bool:
        return len(pids_in(tmp_path)) == running or parent.poll() is not None

    wait_until(all_run, f"the trials to run: {tmp_path / 'script.log'}", timeout=60)
    pids = pids_in(tmp_path)
    assert len(pids) == running, (tmp_path / "script.log").read_text()

    parent.send_signal(number)
    try:
        parent.wait(30)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still there 30 s after {number.name}\n{(tmp_path / 'script.log').read_text()}")

    log = (tmp_path / "script.log").read_text()
    if handler == "own":
        assert f"my own handler {int(number)}" in log
    elif number == signal.SIGTERM:
        assert parent.returncode == -signal.SIGTERM, log
    else:
        assert "KeyboardInterrupt" in log
        assert parent.returncode in (-signal.SIGINT, 1)
    study = optuna.load_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="study")
    states = [trial.state.name for trial in study.trials]
    assert len(states) >= running
    assert set(states) == {"FAIL"}, log
    wait_until(lambda: not any(map(state_of, pids.values())), f"the end of the workers {pids}", timeout=10)
    assert jaxguard.isolated_jax_worker(os.getpid, gpus=2, slot_timeout=5)()


def test_an_interrupt_in_the_calling_thread(
    start: Callable[..., subprocess.Popen[bytes]],
    slots: Callable[[int], None],
    tmp_path: pathlib.Path,
    wait_until: Callable[..., None],
) -> None:
    """Ctrl-C interrupts a plain guarded call; a script that catches it can call again."""
    slots(1)
    code = """
        import os, pathlib, sys, threading
        from jaxguard import isolated_jax_worker

        @isolated_jax_worker(slot_timeout=20)
        def work(folder):
            pathlib.Path(folder, "worker.part").write_text(str(os.getpid()))
            pathlib.Path(folder, "worker.part").rename(pathlib.Path(folder, "worker.pid"))
            threading.Event().wait()

        try:
            work(sys.argv[1])
        except KeyboardInterrupt:
            print("interrupted", isolated_jax_worker(abs, slot_timeout=20)(-3), flush=True)
    """
    parent = start(code, tmp_path)
    wait_until(lambda: pids_in(tmp_path) or parent.poll() is not None, "the worker", timeout=60)

    parent.send_signal(signal.SIGINT)

    assert parent.wait(60) == 0, (tmp_path / "script.log").read_text()
    assert (tmp_path / "script.log").read_text() == "interrupted 3\n"
    assert not state_of(pids_in(tmp_path)["worker"])


@IGNORE_FORK_WARNINGS
@pytest.mark.parametrize("guards_itself", [False, True])
def test_sigterm_after_the_last_call_is_as_before(guards_itself: bool) -> None:  # noqa: FBT001
    """Between guarded calls SIGTERM does what it did before, so it also ends a child that sits in native code.

    A handler in Python that stays behind may never run there: terminating a pool of such children hung now and then.
    """
    jaxguard.isolated_jax_worker(os.getpid)()
    context = multiprocessing.get_context("fork")
    ready, tell = context.Pipe(duplex=False)

    def child() -> None:
        if guards_itself:
            jaxguard.isolated_jax_worker(os.getpid)()
        tell.send("ready")
        in_c_with_the_lock()

    process = context.Process(target=child)
    process.start()
    try:
        assert ready.poll(60)
        process.terminate()
        process.join(20)
        assert process.exitcode == -signal.SIGTERM
    finally:
        process.kill()
        process.join(30)


# ---------------------------------------------------------------- forked children and the lease


@IGNORE_FORK_WARNINGS
def test_a_forked_child_neither_frees_nor_keeps_a_slot(
    slots: Callable[[int], None], wait_until: Callable[..., None]
) -> None:
    """A child forked under `gpu_slot` does not free the slot when it ends, nor keep it when it lives on."""
    slots(1)
    answers: list[Any] = []

    def from_another_thread() -> Any:
        def attempt() -> None:
            try:
                with jaxguard.gpu_slot(slot_timeout=0):
                    answers.append("free")
            except jaxguard.SlotTimeout:
                answers.append("held")

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(30)
        return answers.pop()

    with jaxguard.gpu_slot():
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        assert from_another_thread() == "held"

        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        # The child closes its copies when it begins to run, which may be a moment after the fork.
        wait_until(lambda: from_another_thread() == "free", "the slot is free while the child lives", timeout=10)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_keep_a_dead_parents_slot(
    start: Callable[..., subprocess.Popen[bytes]],
    slots: Callable[[int], None],
    tmp_path: pathlib.Path,
    wait_until: Callable[..., None],
) -> None:
    """The slot of a killed holder is free though its forked child lives."""
    slots(1)
    code = """
        import os, pathlib, sys, time
        import jaxguard

        with jaxguard.gpu_slot():
            if not os.fork():
                pathlib.Path(sys.argv[1], "child.part").write_text(str(os.getpid()))
                pathlib.Path(sys.argv[1], "child.part").rename(pathlib.Path(sys.argv[1], "child.pid"))
            time.sleep(600)
    """
    parent = start(code, tmp_path)
    wait_until(lambda: pids_in(tmp_path) or parent.poll() is not None, "the forked child", timeout=60)
    child = pids_in(tmp_path)["child"]
    try:
        with pytest.raises(jaxguard.SlotTimeout), jaxguard.gpu_slot(slot_timeout=0):
            pass
        parent.kill()
        parent.wait(30)
        with jaxguard.gpu_slot(slot_timeout=10):
            assert state_of(child)
    finally:
        os.kill(child, signal.SIGKILL)
