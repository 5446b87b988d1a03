"""Out of memory: what the kernel counted, and what a death by SIGKILL is put down to."""

from __future__ import annotations

import builtins
import errno
import os
import pathlib
import signal
import textwrap
import uuid
from typing import TYPE_CHECKING, Any

import pytest

import jaxguard
from jaxguard import _linux, _oom, isolated_jax_worker

if TYPE_CHECKING:
    from collections.abc import Callable

V2 = {"/proc/self/cgroup": "0::/user/job\n", "/sys/fs/cgroup/user/job/memory.events": "low 0\noom_kill {}\n"}
V2_CONTAINER = {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.events": "oom_kill {}\n"}
V1 = {
    "/proc/self/cgroup": "4:cpu:/job\n3:cpuset,memory:/job\n0::/\n",
    "/sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill {}\n",
    "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2147483648\n",
}
V1_CONTAINER = {
    "/proc/self/cgroup": "3:memory:/of/the/host\n",
    "/sys/fs/cgroup/memory/memory.oom_control": "oom_kill {}\n",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}
NEITHER = {"/proc/self/cgroup": "broken"}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[..., None]:
    """Give a function that sets what the kernel's files say."""
    real = builtins.open
    told: dict[str, str] = {}

    def say(files: dict[str, str], group: int | None = 0, host: int | None = 0) -> None:
        told.clear()
        told.update({path: text.format(group) for path, text in files.items()})
        if host is not None:
            told["/proc/vmstat"] = f"pgfault 3\noom_kill {host}\n"

    def open_told(path: Any, *args: Any, **named: Any) -> Any:
        if not str(path).startswith(("/proc/self/cgroup", "/proc/vmstat", "/sys/fs/cgroup")):
            return real(path, *args, **named)
        if path not in told:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        copy = tmp_path / uuid.uuid4().hex
        copy.write_text(told[path])
        return real(copy, *args, **named)

    monkeypatch.setattr(_oom, "open", open_told, raising=False)
    monkeypatch.setattr(_linux, "is_there", lambda path: path in told)
    return say


@pytest.mark.parametrize("files", [V2, V2_CONTAINER, V1, V1_CONTAINER], ids=["v2", "v2 inside", "v1", "v1 inside"])
def test_the_control_group_says_so(files: dict[str, str], kernel: Callable[..., None]) -> None:
    """A count that rose in this process's own group is as good as a proof."""
    kernel(files, 3)
    before = _oom.counts()
    assert before == (3, 0)
    kernel(files, 4, host=1)
    text = _oom.explain(before)
    assert text.startswith("out of memory: since this worker began, the kernel ended 1 of the processes")
    assert ("share a memory limit of 2.0 GiB with it" if files is V1 else "share a memory limit with it") in text


def test_only_the_host_says_so(kernel: Callable[..., None]) -> None:
    """Somebody on the host was ended: most likely this one."""
    kernel(NEITHER, host=7)
    before = _oom.counts()
    assert before == (None, 7)
    kernel(NEITHER, host=9)
    assert _oom.explain(before).startswith("most likely out of memory: since this worker began, the kernel ended 2")


def test_nobody_was_ended(kernel: Callable[..., None]) -> None:
    """Then it was not the kernel."""
    kernel(V1, 3)
    assert _oom.explain(_oom.counts()).startswith("by hand or by another program")


def test_a_kernel_that_does_not_tell(kernel: Callable[..., None]) -> None:
    """Nothing is claimed."""
    kernel(NEITHER, host=None)
    assert _oom.counts() == (None, None)
    assert "does not tell which" in _oom.explain(_oom.counts())


def test_killed_by_hand(fresh_guard: Any) -> None:
    """On this host as it is: no process ran out of memory, so it was not that."""
    if _oom.counts() == (None, None):
        pytest.skip("this kernel tells no counts")

    def objective() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(jaxguard.WorkerDied, match="SIGKILL, by hand or by another program"):
        fresh_guard(objective)()


@pytest.fixture
def small_group(memory_group: pathlib.Path) -> pathlib.Path:
    """The same with 400 MiB of memory, and no swap."""
    for name in ("memory.swap.max", "memory.swappiness"):
        if (memory_group / name).exists():
            (memory_group / name).write_text("0")
    name = "memory.max" if (memory_group / "memory.max").exists() else "memory.limit_in_bytes"
    (memory_group / name).write_text(str(400 << 20))
    return memory_group


def test_a_worker_that_the_kernel_ends(small_group: pathlib.Path, run_python: Callable[..., Any]) -> None:
    """For real: a trial takes more memory than its control group has; only that trial fails, and the error says why."""
    code = textwrap.dedent("""
        import os, sys
        with open(sys.argv[1] + "/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
        import optuna
        from jaxguard import WorkerDied, isolated_jax_worker

        @isolated_jax_worker
        def objective(trial):
            if trial.number == 1:
                memory = [bytearray(b"x" * (1 << 20)) for _ in range(4000)]
            return trial.suggest_float("x", 0, 1)

        study = optuna.create_study()
        study.optimize(objective, n_trials=3, catch=(WorkerDied,))
        print(*[trial.state.name for trial in study.trials])
    """)
    done = run_python(code, args=[str(small_group)]).check()
    assert done.stdout.split() == ["COMPLETE", "FAIL", "COMPLETE"], done.stderr
    assert "SIGKILL, out of memory: since this worker began, the kernel ended 1 of the processes" in done.stderr
    assert "a memory limit of 0.4 GiB" in done.stderr


def test_a_warm_worker_counts_from_its_beginning(kernel: Callable[..., None], tmp_path: pathlib.Path) -> None:
    """What happened before a worker began is not put down to it."""
    del tmp_path
    kernel(V2, 5, host=5)
    assert isolated_jax_worker(lambda: 1)() == 1
    with pytest.raises(jaxguard.WorkerDied, match="by hand or by another program"):
        isolated_jax_worker(lambda: os.kill(os.getpid(), signal.SIGKILL))()
