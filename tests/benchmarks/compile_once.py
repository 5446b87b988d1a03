"""What compiling once per host gives: cold workers side by side, a warm store, a study that varies one number.

    python tests/benchmarks/compile_once.py

Prints a table: what was measured, the aim, the result. Ratios are of one run; the ways take turns.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optuna
from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor

from jaxguard import compile_report, isolated_jax_worker, trial_jit
from jaxguard.testing import fake_slots

LAYERS, WORKERS, ROUNDS, TRIALS = 8, 8, 3, 20


def forward(weights: Any, x: Any) -> Any:
    """Apply a stack of convolutions with batch normalisation and shortcuts."""
    for weight in weights:
        y = jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = x + jax.nn.relu(y)
        x = (x - x.mean((0, 1, 2))) / jax.numpy.sqrt(x.var((0, 1, 2)) + 1e-5)
    return x


def updated(weights: Any, x: Any, lr: Any) -> Any:
    """One step of gradient descent."""
    loss, gradient = jax.value_and_grad(lambda w: (forward(w, x) ** 2).mean())(weights)
    return jax.tree.map(lambda p, g: p - lr * g, weights, gradient), loss


step = jax.jit(updated)


def first_step() -> float:
    """From the beginning of the objective to the end of its first step."""
    began = time.monotonic()
    weights = [jax.numpy.zeros((3, 3, 16, 16)) for _ in range(LAYERS)]
    jax.block_until_ready(step(weights, jax.numpy.ones((2, 8, 8, 16)), 0.1))
    return time.monotonic() - began


def at_once(trial: optuna.Trial, folder: pathlib.Path) -> float:
    """Do the first step when all workers are there; say how long after that."""
    (folder / str(trial.number)).touch()
    while len(list(folder.iterdir())) < WORKERS:
        time.sleep(0.002)
    return first_step()


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables for a block."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def cold(folder: pathlib.Path, **options: Any) -> tuple[float, int, int]:
    """Start cold workers at once: seconds until the last has done its first step, compilations, programs."""
    meeting = folder / "meeting"
    shutil.rmtree(meeting, ignore_errors=True)
    meeting.mkdir()
    study = optuna.create_study()
    guard = isolated_jax_worker(**options)
    with fake_slots(WORKERS):
        study.optimize(guard(lambda trial: at_once(trial, meeting)), n_trials=WORKERS, n_jobs=WORKERS)
    report = compile_report(study)
    return (
        max(trial.value for trial in study.trials),
        sum(r.compilations for r in report),
        sum(r.programs for r in report),
    )


def plain(folder: pathlib.Path, directory: str | None) -> float:
    """Start as many processes of joblib's without jaxguard, each with a cache of its own, or one for all."""
    meeting = folder / "meeting"
    shutil.rmtree(meeting, ignore_errors=True)
    meeting.mkdir()
    get_reusable_executor(max_workers=WORKERS, kill_workers=True).shutdown(wait=True)
    with environment(JAX_PLATFORMS="cpu", JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0"):
        calls = [delayed(plainly)(number, str(meeting), directory) for number in range(WORKERS)]
        times = Parallel(n_jobs=WORKERS, backend="loky", batch_size=1)(calls)
    get_reusable_executor(max_workers=WORKERS, kill_workers=True).shutdown(wait=True)
    return max(times)


def plainly(number: int, meeting: str, directory: str | None) -> float:
    """Do what a trial does, in a process that nobody guards."""
    jax.config.update("jax_compilation_cache_dir", directory or tempfile.mkdtemp(dir=meeting + "/.."))
    pathlib.Path(meeting, str(number)).touch()
    while len(os.listdir(meeting)) < WORKERS:
        time.sleep(0.002)
    return first_step()


def say(what: str, aim: str, result: str) -> None:
    """Print one row."""
    print(f"{what:<64} {aim:>16} {result:>16}", flush=True)


def cold_workers(folder: pathlib.Path) -> None:
    """Compare jaxguard with a cache for each worker, and with one JAX cache that all share."""
    ours, own, shared, alone, together = [], [], [], [], []
    for number in range(ROUNDS):
        ours.append(cold(folder, compile_cache=str(folder / f"store{number}")))
        own.append(cold(folder, compile_cache="private"))
        with environment(
            JAX_COMPILATION_CACHE_DIR=str(folder / f"jax{number}"), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0"
        ):
            shared.append(cold(folder, compile_cache="off"))
        alone.append(plain(folder, None))
        together.append(plain(folder, str(folder / f"plain{number}")))
    first = [each[0] for each in ours]
    say(f"{WORKERS} cold workers, last first step: jaxguard, s", "", f"{statistics.median(first):.1f}")
    ways = {
        "processes without jaxguard, a cache for each": alone,
        "processes without jaxguard, one JAX cache for all": together,
        "workers of jaxguard, a cache for each": [each[0] for each in own],
        "workers of jaxguard, one JAX cache for all": [each[0] for each in shared],
    }
    for name, times in ways.items():
        ratio = statistics.median(a / b for a, b in zip(first, times, strict=True))
        say(f"{name}, s; jaxguard / that", "<= 0.30", f"{statistics.median(times):.1f}; {ratio:.2f}")
    say("compilations, programs: jaxguard", "equal", ", ".join(f"{each[1]}/{each[2]}" for each in ours))
    say("compilations: a cache for each; one for all", "", f"{own[-1][1]}; {shared[-1][1]}")
    warm = cold(folder, compile_cache=str(folder / "store0"))
    say("warm store: last first step, s; compilations", "0 compilations", f"{warm[0]:.1f}; {warm[1]}")


def closed_over(trial: optuna.Trial) -> float:
    """Take the learning rate into the program."""
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    weights = [jax.numpy.zeros((3, 3, 16, 16)) for _ in range(LAYERS)]
    closed_step = jax.jit(lambda w, x: updated(w, x, lr))
    return float(closed_step(weights, jax.numpy.ones((2, 8, 8, 16)))[1])


def traced(trial: optuna.Trial) -> float:
    """Pass the learning rate to the program."""
    weights = [jax.numpy.zeros((3, 3, 16, 16)) for _ in range(LAYERS)]
    traced_step = trial_jit(updated, traced={"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)})
    return float(traced_step(weights, jax.numpy.ones((2, 8, 8, 16)))[1])


def one_number(folder: pathlib.Path) -> None:
    """Vary the learning rate only, with a closure and with traced=."""
    taken: dict[str, float] = {}
    objectives: list[tuple[str, Callable[[optuna.Trial], float]]] = [("closure", closed_over), ("traced=", traced)]
    for name, objective in objectives:
        study = optuna.create_study()
        began = time.monotonic()
        guarded = isolated_jax_worker(compile_cache=str(folder / name))(objective)
        with fake_slots(2):
            study.optimize(guarded, n_trials=TRIALS, n_jobs=2)
        taken[name] = time.monotonic() - began
        row = compile_report(study)[0]
        say(f"{TRIALS} trials, {name}: programs of the step; study, s", "", f"{row.programs}; {taken[name]:.1f}")
    say("traced= / closure, seconds", "", f"{taken['traced='] / taken['closure']:.2f}")


def step_call() -> None:
    """What a built step costs more than `jax.jit`."""

    def measured() -> float:
        def bare(x: Any) -> Any:
            return x + 1

        ours, theirs, x = trial_jit(bare), jax.jit(bare), jax.numpy.ones(3)
        ours(x), theirs(x)
        found: dict[Any, list[float]] = {ours: [], theirs: []}
        for _ in range(30):
            for call, times in found.items():
                began = time.perf_counter()
                for _ in range(1000):
                    call(x)
                times.append((time.perf_counter() - began) / 1000)
        return 1e6 * (statistics.median(found[ours]) - statistics.median(found[theirs]))

    with fake_slots(1):
        say("a call of a built trial_jit step, beyond jax.jit, µs", "<= 1", f"{isolated_jax_worker(measured)():.2f}")


def main() -> None:
    """Measure everything."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    say("what", "aim", "result")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        step_call()
        cold_workers(pathlib.Path(folder))
        one_number(pathlib.Path(folder))


if __name__ == "__main__":
    main()
