"""What libraries leave to the end of a process is done at the end of a worker: uploads, checkpoints, queued records."""

from __future__ import annotations

import pathlib
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from jaxguard import isolated_jax_worker

if TYPE_CHECKING:
    from collections.abc import Callable

METRICS = 200


def track(path: str) -> int:
    """Log as experiment trackers do: a daemon thread hands rows to a process that uploads, and at exit both finish."""
    import atexit
    import queue
    import subprocess
    import sys
    import threading

    # It takes its time, and writes only what it was given whole.
    upload = (
        "import sys, time\n"
        "rows = [row for row in sys.stdin]\n"
        "time.sleep(0.3)\n"
        "open(sys.argv[1], 'w').writelines(rows)\n"
    )
    service = subprocess.Popen([sys.executable, "-c", upload, path], stdin=subprocess.PIPE, text=True)
    rows: queue.Queue[str | None] = queue.Queue()

    def flush() -> None:
        assert service.stdin is not None
        while (row := rows.get()) is not None:
            service.stdin.write(row)
        service.stdin.close()

    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()

    def finish() -> None:
        rows.put(None)
        flusher.join()
        assert service.wait() == 0

    atexit.register(finish)
    for step in range(METRICS):
        rows.put(f"step {step}\n")
    return METRICS


def test_an_experiment_tracker(guard: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """All rows are uploaded, whole, by the process that the tracker keeps beside the worker."""
    path = tmp_path / "uploaded"
    with guard() as worker:
        assert worker(track, str(path)) == METRICS
    assert path.read_text().splitlines() == [f"step {step}" for step in range(METRICS)]


def log_to_a_queue(path: str) -> None:
    """Log through a queue and a listener's thread, as programs do whose threads must not wait for a disk."""
    import atexit
    import logging
    import logging.handlers
    import queue
    import time

    class Slow(logging.FileHandler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.005)
            super().emit(record)

    records: queue.Queue[Any] = queue.Queue()
    listener = logging.handlers.QueueListener(records, Slow(path))
    listener.start()
    atexit.register(listener.stop)
    logger = logging.getLogger("queued")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.handlers.QueueHandler(records))
    for step in range(METRICS):
        logger.info("step %d", step)


def test_a_logging_queue(guard: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """No record that was queued is lost."""
    path = tmp_path / "records"
    with guard() as worker:
        worker(log_to_a_queue, str(path))
    assert path.read_text().splitlines() == [f"step {step}" for step in range(METRICS)]


def checkpoint(path: str) -> float:
    """Save a checkpoint with orbax in the background, train on, and wait for it at the end."""
    import jax
    import orbax.checkpoint

    weights = {"w": jax.numpy.arange(300_000.0), "b": jax.numpy.ones(3)}
    checkpointer = orbax.checkpoint.AsyncCheckpointer(orbax.checkpoint.StandardCheckpointHandler())
    checkpointer.save(path, args=orbax.checkpoint.args.StandardSave(weights))
    total = float(weights["w"].sum())
    # As in any program: without this, the interpreter's end closes the executors that it still needs.
    checkpointer.close()
    return total


@pytest.mark.parametrize("reuse", [False, True])
def test_an_async_checkpoint(reuse: bool, tmp_path: pathlib.Path, run_python: Callable[..., Any]) -> None:  # noqa: FBT001
    """An orbax checkpoint that is written in the background is whole, and its threads keep no worker."""
    path = tmp_path / "checkpoint"
    with isolated_jax_worker(reuse=reuse) as worker:
        total = worker(checkpoint, str(path))
    code = textwrap.dedent("""
        import sys
        import orbax.checkpoint
        read = orbax.checkpoint.StandardCheckpointer().restore(sys.argv[1])
        print(float(read["w"].sum()), float(read["b"].sum()))
    """)
    done = run_python(code, args=[str(path)], env={"JAX_PLATFORMS": "cpu"}).check()
    assert done.stdout.split() == [str(total), "3.0"]


def load(indices: Any, batches: Any) -> None:
    """Be a data loader's process: turn indices into batches until there are no more."""
    for index in iter(indices.get, None):
        batches.put((index, [float(index)] * 4))


def train(method: str) -> float:
    """Train on batches that two daemonic processes load, as data loaders do, after JAX has started."""
    import multiprocessing

    import jax

    step = jax.jit(lambda total, batch: total + batch.sum())
    total = step(0.0, jax.numpy.zeros(4))
    context = multiprocessing.get_context(method)
    indices, batches = context.Queue(), context.Queue()
    loaders = [context.Process(target=load, args=(indices, batches), daemon=True) for _ in range(2)]
    for loader in loaders:
        loader.start()
    for index in range(20):
        indices.put(index)
    for _ in range(20):
        total = step(total, jax.numpy.asarray(batches.get(timeout=60)[1]))
    for _ in loaders:
        indices.put(None)
    for loader in loaders:
        loader.join(60)
    return float(total)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_data_loaders(method: str, fresh_guard: Any) -> None:
    """A trial's own loader processes get their work and give their batches."""
    assert fresh_guard(train)(method) == 4 * sum(range(20))


def loses_its_loaders() -> None:
    """End while the loaders still wait for work."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    indices, batches = context.Queue(), context.Queue()
    for _ in range(2):
        context.Process(target=load, args=(indices, batches), daemon=True).start()
    indices.put(1)
    batches.get(timeout=60)
    raise LookupError("in the middle")


def test_data_loaders_of_a_trial_that_fails(fresh_guard: Any) -> None:
    """They hold up nobody, and nothing of them is left (which the end of the test run sees)."""
    with pytest.raises(LookupError, match="in the middle"):
        fresh_guard(loses_its_loaders)()
