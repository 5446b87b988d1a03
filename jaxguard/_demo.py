"""`jaxguard demo`: tune a small convolutional network on handwritten digits.

The first half is what a user would write, and is meant to be copied: data, a network, an objective under the guard. The
second half runs the study and shows it. This process imports JAX, as users' programs do, and never starts it.
"""

# Imported by the command `demo` alone: these imports cost `import jaxguard` nothing, and its words are for a terminal.
# ruff: noqa: TID253, T201

from __future__ import annotations

import logging
import math
import sys
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optuna
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]  # typed only where its stubs are installed

from . import JaxguardError, WorkerDied, isolated_jax_worker, slot_count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

BATCH = 64
EPOCHS = 12

Weights = dict[str, jax.Array]


class Labelled(NamedTuple):
    """Images of shape (n, 8, 8, 1) with values from 0 to 1, and the digit on each: shape (n,)."""

    images: np.ndarray
    labels: np.ndarray


class Digits(NamedTuple):
    """Images to train on, images to choose parameters by, and images that no choice has seen."""

    train: Labelled
    validation: Labelled
    test: Labelled


def load_digits() -> Digits:
    """Load the 1797 digits that come with scikit-learn, in a fixed random order, and split them."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = images[order].reshape(-1, 8, 8, 1).astype(np.float32) / 16
    parts = [len(labels) - 720, len(labels) - 360]
    return Digits(*map(Labelled, np.split(images, parts), np.split(labels[order], parts)))


def new_network(width: int) -> Weights:
    """Draw weights: by NumPy, because on a CPU the program that draws takes longer to compile than all the training."""
    random = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(0, math.sqrt(2 / math.prod(shape[:-1])), shape).astype(np.float32))

    return {
        "conv1": draw(3, 3, 1, width),
        "conv2": draw(3, 3, width, 2 * width),
        "dense": draw(4 * 4 * 2 * width, 10),
        "bias": jnp.zeros(10),
    }


def logits(weights: Weights, images: jax.Array) -> jax.Array:
    """Apply the network: two convolutions, the second with stride 2, and a dense layer."""
    axes = ("NHWC", "HWIO", "NHWC")
    x = jax.nn.relu(jax.lax.conv_general_dilated(images, weights["conv1"], (1, 1), "SAME", dimension_numbers=axes))
    x = jax.nn.relu(jax.lax.conv_general_dilated(x, weights["conv2"], (2, 2), "SAME", dimension_numbers=axes))
    return x.reshape(len(x), -1) @ weights["dense"] + weights["bias"]


@jax.jit
def step(
    weights: Weights, speed: Weights, images: jax.Array, labels: jax.Array, learning_rate: float, momentum: float
) -> tuple[Weights, Weights]:
    """Take one step of gradient descent. The tuned numbers are arguments: all their values share one program."""

    def loss(weights: Weights) -> jax.Array:
        chances = jax.nn.log_softmax(logits(weights, images))
        return -jnp.take_along_axis(chances, labels[:, None], axis=1).mean()

    slope = jax.grad(loss)(weights)
    speed = jax.tree.map(lambda v, g: momentum * v - learning_rate * g, speed, slope)
    return jax.tree.map(jnp.add, weights, speed), speed


@jax.jit
def accuracy(weights: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Say which part of the images is recognised."""
    return (logits(weights, images).argmax(axis=-1) == labels).mean()


def train(data: Labelled, learning_rate: float, momentum: float, width: int) -> Iterator[Weights]:
    """Train a new network, and give its weights after each epoch.

    The width is part of the weights' shapes, so each width has programs of its own.
    """
    random = np.random.default_rng(1)
    weights = new_network(width)
    speed = jax.tree.map(jnp.zeros_like, weights)
    for _ in range(EPOCHS):
        order = random.permutation(len(data.labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            weights, speed = step(weights, speed, data.images[batch], data.labels[batch], learning_rate, momentum)
        yield weights


@isolated_jax_worker
def objective(trial: optuna.Trial, digits: Digits) -> float:
    """Train with the parameters that the trial suggests; report each epoch, so that a bad trial ends early."""
    learning_rate = trial.suggest_float("learning_rate", 1e-3, 1.0, log=True)
    momentum = trial.suggest_float("momentum", 0.0, 0.95)
    width = trial.suggest_categorical("width", [16, 32, 64])

    value = 0.0
    for epoch, weights in enumerate(train(digits.train, learning_rate, momentum, width)):
        value = float(accuracy(weights, *digits.validation))
        trial.report(value, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value


@isolated_jax_worker
def final_accuracy(parameters: dict[str, Any], digits: Digits) -> float:
    """Train once more on all but the test images, and say which part of those is recognised."""
    data = Labelled(*map(np.concatenate, zip(digits.train, digits.validation, strict=True)))
    *_, weights = train(data, **parameters)
    return float(accuracy(weights, *digits.test))


def run(options: argparse.Namespace) -> int:
    """Run the study and show it.

    Args:
        options: `trials`, `jobs` (None: one for each slot), `seed`, `storage` (None: in memory), and `refuse`, which
            ends the program because of a bad value.

    Returns:
        The exit status: 0, or 1 if the study failed.
    """
    optuna.logging.disable_default_handler()  # its lines would run into the bar, see `_Failures`
    try:
        return _run(options)
    except JaxguardError as error:
        return _fail(error)
    finally:
        optuna.logging.enable_default_handler()


def _run(options: argparse.Namespace) -> int:
    study = _study(options)
    try:
        slots = slot_count()
    except ValueError as error:  # a setting is not valid
        return _fail(error)
    try:
        digits = load_digits()
    except ImportError as error:
        return _fail(f'scikit-learn brings the digits, and is missing here ({error}): pip install "jaxguard[demo]"')
    jobs = options.jobs or slots

    print(f"{_count(options.trials, 'trial')}, {jobs} at a time, on a host with {_count(slots, 'slot')}.")
    if study.trials:
        print(f"The study has {_count(len(study.trials), 'earlier trial')}.")
    try:
        with progress(options.trials) as show:
            study.optimize(
                partial(objective, digits=digits),
                n_trials=options.trials,
                n_jobs=jobs,
                catch=(WorkerDied,),
                callbacks=[show],
            )
    finally:  # after Ctrl-C and errors too: what is there
        best = _best(study)
        print(table(study.trials))
        if best is not None:
            print(f"\nBest: trial {best.number}, {best.value:.2%} of the validation images recognised, with")
            for name, value in best.params.items():
                print(f"  {name} = {value:.4g}" if isinstance(value, float) else f"  {name} = {value}")
    if best is None:
        return _fail("no trial was completed")
    recognised = final_accuracy(best.params, digits)
    print(f"\nTest accuracy: {recognised:.2%}, on {len(digits.test.labels)} images kept apart.")
    return 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _fail(why: object) -> int:
    print(f"jaxguard demo: {why}", file=sys.stderr)
    return 1


def _study(options: argparse.Namespace) -> optuna.Study:
    refuse: Callable[[str], NoReturn] = options.refuse
    try:
        study = optuna.create_study(
            study_name="jaxguard-demo",
            direction="maximize",
            storage=options.storage,
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1),
        )
    except Exception as error:  # noqa: BLE001 -- each database driver has errors of its own
        reason = str(error).partition("\n")[0] or type(error).__name__
        refuse(f"argument --storage: cannot be opened: {reason}")
    # A study that goes on needs another seed, or it would try its first parameters again.
    study.sampler = optuna.samplers.TPESampler(seed=(options.seed + len(study.trials)) % 2**32)
    return study


def _best(study: optuna.Study) -> optuna.trial.FrozenTrial | None:
    try:
        return study.best_trial
    except ValueError:  # no trial is complete
        return None


def table(trials: Sequence[optuna.trial.FrozenTrial]) -> str:
    """Lay trials out as text, one a line.

    What the guard noted about a trial is shown where it is there: a trial that did not get a slot has no such note.
    """
    rows: list[tuple[str, ...]] = [("trial", "state", "value", "device", "waited", "ran")]
    for trial in trials:
        note = trial.user_attrs.get("jaxguard", {})
        rows.append(
            (
                str(trial.number),
                trial.state.name.lower(),
                "-" if trial.value is None else f"{trial.value:.4f}",
                ", ".join(map(_short, note.get("devices", ()))) or "-",
                *("-" if note.get(key) is None else f"{note[key]:.1f} s" for key in ("waited_s", "run_s")),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {1, 3}
    lines = (
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(lines)


def _short(device: str) -> str:
    """Cut a UUID after its first group, which is enough to tell the GPUs of a host apart."""
    return "-".join(str(device).split("-")[:2])


@contextmanager
def progress(total: int) -> Iterator[Callable[[optuna.Study, optuna.trial.FrozenTrial], None]]:
    """Show a progress bar on a terminal; what is written meanwhile, by workers too, appears above it.

    Yields:
        What to call after each trial, from any thread.
    """
    stdout, stderr = sys.stdout, sys.stderr
    tqdm.set_lock(threading.RLock())  # the default is also a lock for processes, and may start one to look after it
    with tqdm(total=total, file=stderr, disable=None, unit="trial", dynamic_ncols=True) as bar:

        def show(study: optuna.Study, _: optuna.trial.FrozenTrial) -> None:
            best = _best(study)
            with bar.get_lock():
                if best is not None:
                    bar.set_description(f"best {best.value:.4f}", refresh=False)
                bar.update()

        above = _AboveTheBar(stdout, bar=stderr), _AboveTheBar(stderr, bar=stderr)
        sys.stdout, sys.stderr = above
        failures = _Failures()
        logger = logging.getLogger("optuna")
        logger.addHandler(failures)
        try:
            yield show
        finally:
            logger.removeHandler(failures)
            sys.stdout, sys.stderr = stdout, stderr
            for stream in above:
                stream.end_line()


class _AboveTheBar:
    """A stream that takes the bar away while it writes whole lines. tqdm's own does so for one of two streams only."""

    def __init__(self, stream: TextIO, *, bar: TextIO) -> None:
        self._stream, self._bar, self._begun = stream, bar, ""

    def write(self, text: str) -> int:  # by any thread
        with tqdm.get_lock():
            lines, end, self._begun = (self._begun + text).rpartition("\n")
            if end:
                with tqdm.external_write_mode(file=self._bar):
                    self._stream.write(lines + end)
                    self._stream.flush()
        return len(text)

    def end_line(self) -> None:
        if self._begun:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Failures(logging.Handler):
    """Say in a line why a trial failed; that Ctrl-C ended it is known."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], Exception):
            print(record.getMessage(), file=sys.stderr)
