"""Whereabouts: a process tells where its threads are, whatever they do, and nothing of it fails by being asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from jaxguard import _linux, _whereabouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLACE = os.path.dirname(os.path.dirname(os.path.abspath(_whereabouts.__file__)))
LISTEN = f"""
import sys
sys.path.insert(0, {PLACE!r})
import faulthandler, os, select, signal, socket, threading, time
from jaxguard import _whereabouts
_whereabouts.answer_here(_whereabouts.PARENT)
"""


@pytest.fixture
def run() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Give a function that starts code in a process, and comes back when that has printed a line."""
    started = []

    def start(code: str, *, listen: bool = True) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", (LISTEN if listen else "") + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield start
    for process in started:
        with process:
            process.kill()


def ask(process: subprocess.Popen[str]) -> str:
    return _whereabouts.ask(process.pid, _whereabouts.PARENT)


WAYS = {
    "asleep": "def here():\n    print('.', flush=True)\n    time.sleep(100)\nhere()",
    "in C with the GIL": (
        "import collections, itertools\n"
        "def here():\n    print('.', flush=True)\n    collections.deque(itertools.repeat(0), maxlen=0)\nhere()"
    ),
    "waiting for a child": (
        "import subprocess\n"
        "def here():\n    child = subprocess.Popen(['sleep', '100'])\n"
        "    print('.', flush=True)\n    child.wait()\nhere()"
    ),
    "in a thread": (
        "def here():\n    print('.', flush=True)\n    threading.Event().wait()\n"
        "threading.Thread(target=here).start()\nthreading.Event().wait()"
    ),
}


# As a worker listens.
CAREFUL = "_whereabouts.answer_carefully(_whereabouts._open(os.getpid(), _whereabouts.PARENT))\n"


@pytest.mark.parametrize("careful", [CAREFUL, ""], ids=["a worker", "a parent"])
@pytest.mark.parametrize("way", list(WAYS))
def test_wherever_it_is(way: str, careful: str, run: Any) -> None:
    """Asleep, in C code that holds the interpreter's lock, waiting for a child, in any thread."""
    if way == "in C with the GIL" and not careful:
        pytest.skip("a main thread that runs cannot be told from one that runs Python, where nobody answers carefully")
    process = run(careful + WAYS[way])
    for _ in range(3):
        assert "in here\n" in ask(process) + "\n"
    assert process.poll() is None
    subprocess.run(["pkill", "-P", str(process.pid)], check=False)


def test_nothing_fails_by_being_asked(run: Any) -> None:
    """Sleeps last as long as they shall, reads and waits go on: a hundred questions interrupt none of them."""
    process = run("""
a, b = socket.socketpair()
def short():
    while True:
        began = time.monotonic()
        time.sleep(0.05)
        assert time.monotonic() - began >= 0.05
        a.send(b"x")
        assert b.recv(1) == b"x"
        assert select.select([b], [], [], 0.01) == ([], [], [])
thread = threading.Thread(target=short, daemon=True)
thread.start()
print(".", flush=True)
line = sys.stdin.readline()
print(thread.is_alive(), line, flush=True)
""")
    for _ in range(100):
        assert "Thread" in ask(process)
    answer, _ = process.communicate("go on\n", timeout=60)
    assert answer == "True go on\n\n"


@pytest.mark.parametrize("careful", [CAREFUL, ""], ids=["a worker", "a parent"])
def test_native_code_is_not_interrupted(careful: str, run: Any) -> None:
    """A system call of a C library, which looks for no signals, goes on."""
    process = run(
        careful + "import ctypes\nprint('.', flush=True)\nletter = ctypes.create_string_buffer(1)\n"
        "print(ctypes.CDLL(None).read(0, letter, 1), letter.raw, flush=True)"
    )
    for _ in range(3):
        assert "<string>" in ask(process)
    answer, _ = process.communicate("x", timeout=60)
    assert answer == "1 b'x'\n"


HOT = """
def deep(n):
    return 0 if n == 0 else deep(n - 1) + 1
def generate(n):
    yield n
    if n:
        yield from generate(n - 1)
def hot():
    while True:
        deep(400), list(generate(50))
for _ in range(2):
    threading.Thread(target=hot, daemon=True).start()
print(".", flush=True)
hot()
"""


@pytest.mark.parametrize("careful", [CAREFUL, ""], ids=["a worker", "a parent"])
def test_stacks_that_change_crash_nobody(careful: str, run: Any) -> None:
    """Threads that run Python as fast as they can, and whose stacks are different at each step, live through it."""
    process = run(careful + HOT)
    answers = [ask(process) for _ in range(150 if careful else 60)]
    assert process.poll() is None
    if careful:
        assert all(answer.count("Thread ") == 3 and "in hot" in answer for answer in answers)
    else:
        assert all("Thread" in answer or "running at this moment" in answer for answer in answers)


def test_one_that_does_not_listen_is_not_signalled(run: Any) -> None:
    """The signal would end it."""
    process = run("import time; print('.', flush=True); time.sleep(100)", listen=False)
    assert ask(process) == "(no stacks: it does not answer, or not yet)"
    assert process.poll() is None


def test_one_that_has_given_the_signal_up_is_not_signalled(run: Any) -> None:
    """A program that has set it back to its default would end by it."""
    process = run(
        f"signal.signal({int(_whereabouts.AT_ONCE)}, signal.SIG_DFL); print('.', flush=True); time.sleep(100)"
    )
    assert ask(process) == "(no stacks: it does not answer, or not yet)"
    assert process.poll() is None


def test_a_stopped_one_says_why_it_is_silent(run: Any, wait_until: Callable[..., None]) -> None:
    """And answers again when it goes on."""
    process = run("print('.', flush=True); time.sleep(100)")
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: getattr(_linux.status(process.pid), "state", "") == "T", "it is stopped")
    assert "stopped, by SIGSTOP" in ask(process)
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: "<string>" in ask(process), "it answers again")


def test_one_that_has_ended(run: Any) -> None:
    """No process, or only its entry in the table."""
    process = run("print('.', flush=True)")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ask(process) == "(no stacks: ended)"
    process.wait()
    assert ask(process) == "(no stacks: ended)"


def test_a_program_that_uses_the_signal_keeps_it(run: Any) -> None:
    """Its own handler stays, and the file of stacks is not there."""
    process = run(
        f"""
import signal, sys, time
sys.path.insert(0, {PLACE!r})
signal.signal({int(_whereabouts.AT_ONCE)}, lambda *_: print("mine", flush=True))
from jaxguard import _whereabouts
_whereabouts.answer_here(_whereabouts.PARENT)
print(".", flush=True)
time.sleep(100)
""",
        listen=False,
    )
    assert ask(process) == "(no stacks: it does not answer, or not yet)"
    os.kill(process.pid, _whereabouts.AT_ONCE)
    assert process.stdout.readline() == "mine\n"


def test_the_file_does_not_grow_for_ever(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader empties it once it is large."""
    monkeypatch.setattr(_whereabouts, "_LARGE", 1000)
    process = run("print('.', flush=True); time.sleep(100)")
    sizes = []
    for _ in range(30):
        assert "<string>" in ask(process)
        file = _whereabouts._open(process.pid, _whereabouts.PARENT)
        sizes.append(os.fstat(file).st_size)
        os.close(file)
    assert max(sizes) < 2000


def test_two_who_ask_at_once(run: Any) -> None:
    """Each gets whole stacks."""
    process = run("def here():\n    print('.', flush=True)\n    time.sleep(100)\nhere()")
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.extend(ask(process) for _ in range(20))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 60
    assert all("in here\n" in answer + "\n" for answer in answers)


def test_a_signal_after_the_interpreters_end_is_ignored(run: Any) -> None:
    """One that is still on its way when faulthandler has ended does not end the process."""
    process = run(
        "faulthandler.unregister(_whereabouts.AT_ONCE)\n"
        "os.kill(os.getpid(), _whereabouts.AT_ONCE)\nprint('.', flush=True)\ntime.sleep(100)"
    )
    assert process.poll() is None
    assert ask(process) == "(no stacks: it does not answer, or not yet)"


def test_a_forked_child_does_not_answer(run: Any) -> None:
    """Its copy of the file is closed, and the number may be another file's by then."""
    process = run("""
reads, writes = os.pipe()
child = os.fork()
if child == 0:
    print(".", flush=True)
    time.sleep(100)
os.waitpid(child, 0)
""")
    (child,) = _linux.children(process.pid)
    try:
        assert _whereabouts.kinds(process.pid) == {_whereabouts.PARENT}
        assert _whereabouts.kinds(child) == set()
        assert not _linux.catches(child, _whereabouts.AT_ONCE)
        assert "waitpid" in ask(process) or "<string>" in ask(process)
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_workers_own_frames_are_left_out() -> None:
    """From the user's function on, in each thread."""
    raw = """Thread 0x1 (most recent call first):
  File "train.py", line 3 in step
  File "train.py", line 9 in objective
  File "/x/jaxguard/_worker.py", line 208 in _do
  File "/x/jaxguard/_worker.py", line 170 in serve

Current thread 0x2 (most recent call first):
  File "threading.py", line 1 in wait
Extension modules: numpy (total: 1)
"""
    text = _whereabouts.from_the_job_on(raw)
    assert "objective" in text
    assert "_worker.py" not in text
    assert "threading.py" in text
    assert "Extension" not in text


def test_pause_is_not_ended(run: Any, wait_until: Callable[..., None]) -> None:
    """A main thread that waits for a signal, any signal, is left alone; the other threads are shown."""
    process = run("""
def here():
    threading.Event().wait()
threading.Thread(target=here, daemon=True).start()
print(".", flush=True)
signal.pause()
""")
    wait_until(lambda: _linux.waits_for_a_signal(process.pid, process.pid), "it is in pause")
    wait_until(lambda: "in here" in ask(process), "the thread is there")
    for _ in range(3):
        ask(process)
    assert process.poll() is None


def test_a_thread_that_blocks_the_signal_costs_nothing(run: Any) -> None:
    """It is passed over, and no signal stays queued for it."""
    process = run("""
def here():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(100)
for _ in range(5):
    threading.Thread(target=here, daemon=True).start()
time.sleep(0.1)
print(".", flush=True)
time.sleep(100)
""")
    for _ in range(3):
        assert ask(process).count("Thread") == 1
    with open(f"/proc/{process.pid}/status") as file:
        queued = next(line.split()[1] for line in file if line.startswith("SigQ"))
    before = int(queued.split("/")[0])
    ask(process)
    with open(f"/proc/{process.pid}/status") as file:
        assert int(next(line.split()[1] for line in file if line.startswith("SigQ")).split("/")[0]) <= before


def test_a_process_that_has_become_another_program_is_not_signalled(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first look and the signal it may call exec, which takes the handler away."""
    process = run("print('.', flush=True)\nsys.stdin.readline()\nos.execvp('sleep', ['sleep', '100'])")
    real = _whereabouts._be_alone

    def meanwhile(*words: Any) -> None:
        process.stdin.write("go\n")
        process.stdin.flush()
        while _linux.command(process.pid) != "sleep":
            pass
        real(*words)

    monkeypatch.setattr(_whereabouts, "_be_alone", meanwhile)
    assert "no stacks" in ask(process)
    assert process.poll() is None


def test_a_user_who_closes_all_files_keeps_his_own(run: Any, tmp_path: Any) -> None:
    """Nothing is written into a file that has got the number of ours."""
    path = tmp_path / "mine"
    process = run(
        CAREFUL + f"path = {str(path)!r}\nout = os.dup(1)\nos.closerange(3, out)\n"
        "files = [open(path, 'w') for _ in range(20)]\nos.write(out, b'.\\n')\ntime.sleep(100)"
    )
    for _ in range(3):
        assert ask(process).startswith("(no stacks")
    os.kill(process.pid, _whereabouts.CAREFUL)
    os.kill(process.pid, _whereabouts.CAREFUL)
    assert process.poll() is None
    assert path.read_text() == ""


def test_descriptors_that_come_and_go_hide_nothing(run: Any) -> None:
    """A program that opens and closes files all the time is seen at each look."""
    process = run("""
def churn():
    while True:
        os.close(os.open("/dev/null", os.O_RDONLY))
threading.Thread(target=churn, daemon=True).start()
print(".", flush=True)
time.sleep(100)
""")
    assert all(_whereabouts.kinds(process.pid) == {_whereabouts.PARENT} for _ in range(200))


def test_a_careful_answer_never_fails_the_user(run: Any) -> None:
    """Near the limit of recursion, or where no file may grow, whoever asks gets less, and the program goes on."""
    process = run(
        CAREFUL
        + """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
print(".", flush=True)
while True:
    time.sleep(0.001)
"""
    )
    for _ in range(3):
        ask(process)
    assert process.poll() is None
