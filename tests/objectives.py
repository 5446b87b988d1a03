"""Objectives for comparing studies.

Workers import this module: it imports nothing but what an Optuna program has, so that a fresh process stays cheap.
"""

from __future__ import annotations

import optuna

GRID = {"x": [-1.0, 0.0, 1.0], "n": [1, 3], "kind": ["a", "b"]}


def mixed(trial: optuna.Trial) -> float:
    """Use parameters of all kinds, one of them only sometimes, with reports and pruning."""
    x = trial.suggest_float("x", -2, 2)
    n = trial.suggest_int("n", 1, 5)
    kind = trial.suggest_categorical("kind", ["a", "b", "c"])
    value = x**2 + n
    if kind == "b":
        value += trial.suggest_float("rate", 1e-4, 1.0, log=True)
    for step in range(1, 10):
        trial.report(value / step, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value


def numbers(trial: optuna.Trial) -> float:
    """Use numbers alone, for samplers that know nothing else."""
    x, y = trial.suggest_float("x", -2, 2), trial.suggest_float("y", -2, 2)
    return (x - 1) ** 2 + (y + 0.5) ** 2


def on_grid(trial: optuna.Trial) -> float:
    """Use the parameters of GRID."""
    x, n = trial.suggest_float("x", -1, 1), trial.suggest_int("n", 1, 3)
    return x * n + (trial.suggest_categorical("kind", ["a", "b"]) == "a")


def discrete(trial: optuna.Trial) -> float:
    """Use a space that can be walked through."""
    n = trial.suggest_int("n", 1, 3)
    return n + trial.suggest_float("x", 0, 1, step=0.5) if n > 1 else 0.0


def trade_off(trial: optuna.Trial) -> tuple[float, float]:
    """Have two objectives."""
    x, n = trial.suggest_float("x", 0, 2), trial.suggest_int("n", 0, 5)
    return x**2 + n, (x - 2) ** 2


def constrained(trial: optuna.Trial) -> float:
    """Have constraints, reports and pruning at once."""
    x, y = trial.suggest_float("x", -2, 2), trial.suggest_float("y", -2, 2)
    if hasattr(trial, "set_constraint"):
        trial.set_constraint("disc", x**2 + y**2 - 2)
        trial.set_constraint("half", x - 1)
    for step in range(4):
        trial.report(x + y + step, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return x + y


def failing(trial: optuna.Trial) -> float:
    """Fail now and then: samplers and pruners see failed trials too."""
    x = trial.suggest_float("x", -1, 1)
    if trial.number % 4 == 2:
        raise ArithmeticError
    return x**2
