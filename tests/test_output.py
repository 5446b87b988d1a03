"""What a worker writes reaches the caller's streams, whole and in order; what it reads is empty."""

from __future__ import annotations

import contextlib
import io
import os
import select
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

import jaxguard

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

MIB = 1 << 20


def test_all_ways_to_write(guard: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Python's print, native writes and child processes reach the caller's `sys.stdout` and `sys.stderr`."""

    @guard
    def write() -> None:
        print("printed")
        os.write(1, b"native\n")
        subprocess.run(["/bin/echo", "echoed"], check=True)
        print("printed to stderr", file=sys.stderr)
        os.write(2, b"native to stderr\n")
        subprocess.run(["/bin/sh", "-c", "echo echoed to stderr >&2"], check=True)

    write()

    out, err = capsys.readouterr()
    assert out.splitlines() == ["printed", "native", "echoed"]
    assert err.splitlines() == ["printed to stderr", "native to stderr", "echoed to stderr"]


def test_pytests_capture_of_descriptors(guard: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """The same under `capfd`, and the order within a stream is kept however a line was written."""

    @guard
    def count() -> None:
        for number in range(100):
            print(2 * number)
            os.write(1, f"{2 * number + 1}\n".encode())

    count()

    assert [int(line) for line in capfd.readouterr().out.split()] == list(range(200))


def test_any_stream_will_do(guard: Callable[..., Any]) -> None:
    """The caller's `sys.stdout` at the call counts, though it is only an object that can write."""
    say = guard(print)

    with contextlib.redirect_stdout(io.StringIO()) as one:
        say("one")
    with contextlib.redirect_stdout(io.StringIO()) as two, contextlib.redirect_stderr(io.StringIO()) as err:
        say("two")

    assert (one.getvalue(), two.getvalue(), err.getvalue()) == ("one\n", "two\n", "")


@pytest.mark.parametrize("stream", [None, "closed", "raises"])
def test_no_stream_at_all(fresh_guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, stream: str | None) -> None:
    """A caller without a usable `sys.stdout` still gets its value."""

    class Raises(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, f"no space for {len(text)}")

    broken: Any = {None: None, "closed": io.StringIO(), "raises": Raises()}[stream]
    if stream == "closed":
        broken.close()
    monkeypatch.setattr(sys, "stdout", broken)
    value = fresh_guard(lambda: (print("x" * MIB), 3)[1])()
    monkeypatch.undo()

    assert value == 3


def test_a_flood(guard: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """A mebibyte on each stream blocks nobody, and all of it arrives."""

    @guard
    def flood() -> int:
        sys.stderr.write("e" * MIB)
        sys.stdout.write("o" * MIB)
        os.write(2, b"E" * MIB)
        return 3

    assert flood() == 3

    out, err = capfd.readouterr()
    assert out.count("o") == MIB
    assert (err.count("e"), err.count("E")) == (MIB, MIB)


def test_a_large_result_and_a_flood_together(guard: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Output, a large argument and a large result pass each other."""

    @guard
    def both(data: bytes) -> bytes:
        sys.stderr.write("e" * MIB)
        return data[::-1]

    data = bytes(range(256)) * (16 * 1024)

    assert both(data) == data[::-1]
    assert capfd.readouterr().err.count("e") == MIB


def test_what_was_not_flushed(guard: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Half a line is there when the call returns; what atexit handlers print is there when the worker has ended."""

    def write(word: str) -> None:
        import atexit

        atexit.register(print, f"end of {word}")
        sys.stdout.write(f"half of {word};")

    with guard() as worker:
        worker(write, "one")
        assert "half of one;" in capfd.readouterr().out or not guard.reuse  # type: ignore[attr-defined]
        worker(write, "two")
    out = capfd.readouterr().out

    assert "half of two;" in out
    assert "end of two" in out


def test_half_a_line(guard: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """What a function wrote without a newline is there when its call returns."""
    guard(lambda: sys.stdout.write("half"))()

    assert capfd.readouterr().out == "half"


def test_bytes_that_are_no_text(guard: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Bytes outside UTF-8 break nothing, and text of many bytes survives however it is cut on its way."""

    @guard
    def write() -> None:
        os.write(1, b"\xff\xfe caf\xe9\n")
        for byte in "é€🙂\n".encode():
            os.write(1, bytes([byte]))
        sys.stdout.write("€" * 100_000 + "\n")
        print("\udc80 lone surrogate")

    write()

    first, second, third, fourth = capfd.readouterr().out.splitlines()
    assert "caf" in first
    assert second == "é€🙂"
    assert third == "€" * 100_000
    assert "lone surrogate" in fourth


def test_output_comes_while_the_function_runs(guard: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """A line is shown when it is written, not when the call ends."""
    flag = tmp_path / "seen"

    class Touch(io.StringIO):
        def write(self, text: str) -> int:
            if "ready" in text:
                flag.touch()
            return super().write(text)

    @guard
    def wait() -> bool:
        print("ready")
        deadline = time.monotonic() + 30
        while not flag.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        return flag.exists()

    with contextlib.redirect_stdout(Touch()):
        assert wait()


def test_a_warm_worker_may_write_between_two_calls(
    tmp_path: pathlib.Path,
    wait_until: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
    slots: Callable[[int], None],
) -> None:
    """A thread that a call left behind is not blocked when it writes, though nobody waits for it."""
    slots(1)  # with a second one, a call that comes while output is passed on may start another worker
    done = tmp_path / "done"

    @jaxguard.isolated_jax_worker(reuse=True)
    def leave_a_thread() -> int:
        import threading

        def write() -> None:
            os.write(2, b"e" * MIB)
            done.touch()

        threading.Timer(0.1, write).start()
        return os.getpid()

    pid = leave_a_thread()
    wait_until(done.exists, "the thread of a warm worker has written a mebibyte")

    assert leave_a_thread() == pid
    wait_until(lambda: "e" in capfd.readouterr().err, "its output to arrive", timeout=20)


def test_reading_gives_the_end_of_file(guard: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Standard input is empty, for `input()`, `sys.stdin`, native reads and child processes."""

    @guard
    def read() -> tuple[Any, ...]:
        try:
            input("name? ")
        except EOFError:
            asked = "EOFError"
        cat = subprocess.run(["/bin/cat"], capture_output=True, timeout=30, check=True)
        return asked, sys.stdin.read(), os.read(0, 10), cat.stdout

    assert read() == ("EOFError", "", b"", b"")
    assert "name? " in capfd.readouterr().out


def test_breakpoint_says_what_to_do(guard: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """A worker has no terminal for a debugger, so it names the setting that brings the function home."""

    @guard
    def debug() -> int:
        breakpoint()  # noqa: T100
        return 3

    try:
        text = str(debug())
    except Exception as error:  # noqa: BLE001 - an error or a text on stderr, both tell
        text = str(error)

    assert "JAXGUARD_INLINE" in text + "".join(capfd.readouterr())


def test_a_real_terminal(tmp_path: pathlib.Path) -> None:
    """On a terminal, output of fresh and warm workers appears on it, control characters included."""
    code = textwrap.dedent("""
        import os, sys
        from jaxguard import isolated_jax_worker

        def work():
            print("printed")
            os.write(1, b"10%\\r20%\\r\\x1b[32mgreen\\x1b[0m\\n")
            os.system("echo echoed")
            print("to stderr", file=sys.stderr)

        isolated_jax_worker(work)()
        isolated_jax_worker(work, reuse=True)()
        print("end", sys.stdout.isatty())
    """)
    script = tmp_path / "script.py"
    script.write_text(code)
    place = os.path.dirname(os.path.dirname(os.path.abspath(jaxguard.__file__)))
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([place, os.environ.get("PYTHONPATH", "")])},
        start_new_session=True,
    )
    os.close(slave)
    data = b""
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline and select.select([master], [], [], deadline - time.monotonic())[0]:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # a terminal's end of file
                break
            data += chunk
            if not chunk:
                break
        assert process.wait(30) == 0, data.decode()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(30)
        os.close(master)

    text = data.decode().replace("\r\n", "\n")
    assert text.count("printed\n10%\r20%\r\x1b[32mgreen\x1b[0m\nechoed\n") == 2, text
    assert text.count("to stderr\n") == 2
    assert text.endswith("end True\n")


class Unsupported(io.StringIO):
    """A stream that refuses to be written to."""

    def write(self, _: str) -> int:
        raise io.UnsupportedOperation("not writable")


def test_a_stream_that_refuses_fails_no_trial(fresh_guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial is worth more than what it prints."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Unsupported())
        assert fresh_guard(prints)() == "done"


def prints() -> str:
    """Print, and give a result."""
    print("a line")
    return "done"
