"""One parent of the soak: a study whose trials do all that trials do, and all that they should not.

    study.py FOLDER INDEX TRIALS JOBS SEED

It may be killed at any time and started again: it goes on until so many trials are finished. What it knows of each
trial it writes down, line by line, in FOLDER/log-INDEX.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

import optuna

from jaxguard import gpu_slot, isolated_jax_worker

TIMEOUT_S = 3.0
KINDS = {
    "return": 30,
    "compile": 20,
    "prune": 5,
    "array": 5,
    "raise": 6,
    "sys.exit": 3,
    "os._exit": 3,
    "segfault": 3,
    "abort": 2,
    "hang": 2,
    "hang in C": 1,
    "deaf": 1,
    "leak a child": 6,
    "leak a session": 5,
    "daemonize": 5,
    "leave a thread": 4,
    "flood": 5,
    "not picklable": 4,
    "pool": 2,
}
"""What trials do, and how often."""


def value_of(x: float, y: int) -> float:
    """What a trial with these parameters returns: a wrong answer is one that got into the wrong call."""
    return round(x * 1000) + y / 10


def kind_of(seed: int, index: int, number: int) -> str:
    """What a trial does: the same each time, whoever runs it."""
    rng = random.Random(f"{seed}/{index}/{number}")
    return rng.choices(list(KINDS), weights=list(KINDS.values()))[0]


def be_alone(folder: str) -> None:
    """Write it down if another process is on the same slot, by a lock that knows nothing of jaxguard."""
    import fcntl

    if hasattr(sys, "lock_of_the_soak"):
        return  # a warm worker: it has the lock until it ends
    with gpu_slot() as slot:
        device = slot.devices[0].id
    sys.lock_of_the_soak = lock = os.open(f"{folder}/slot-{device}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with open(f"{folder}/double-holders", "a") as file:
            file.write(f"{device} pid {os.getpid()}\n")


def behave(kind: str, trial: Any, value: float) -> Any:
    """Do what this kind does; most end it in their own way."""
    import ctypes
    import subprocess
    import threading

    if kind == "compile":
        import jax

        step = jax.jit(lambda w: (jax.numpy.sin(w) @ jax.numpy.cos(w).T).sum())
        step(jax.numpy.ones((8, 1 + trial.number % 5))).block_until_ready()
    elif kind == "prune":
        trial.report(value, 0)
        raise optuna.TrialPruned
    elif kind == "array":
        import numpy as np

        return np.full(500_000, value)[7]
    elif kind == "raise":
        raise ZeroDivisionError(trial.number)
    elif kind == "sys.exit":
        sys.exit(5)
    elif kind == "os._exit":
        os._exit(6)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "abort":
        os.abort()
    elif kind == "hang":
        time.sleep(3600)
    elif kind == "hang in C":
        __import__("collections").deque(iter(int, 1), maxlen=0)
    elif kind == "deaf":
        __import__("signal").signal(15, lambda *_: None)
        while True:
            time.sleep(60)
    elif kind == "leak a child":
        subprocess.Popen(["sleep", "3600"])
    elif kind == "leak a session":
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
    elif kind == "daemonize":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(0)
    elif kind == "leave a thread":
        threading.Thread(target=time.sleep, args=(0.2,)).start()
    elif kind == "flood":
        for _ in range(20):
            os.write(2, b"flood " * 20_000 + b"\n")
    elif kind == "not picklable":
        return threading.Lock()
    elif kind == "pool":
        import concurrent.futures
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            assert pool.submit(abs, -3).result() == 3
    return value


def main() -> None:
    """Run the study to its end."""
    folder, index, trials, jobs, seed = sys.argv[1], *map(int, sys.argv[2:])
    log = os.open(f"{folder}/log-{index}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: str, **facts: Any) -> None:
        os.write(log, json.dumps({"time": time.time(), "event": event, "pid": os.getpid(), **facts}).encode() + b"\n")

    @isolated_jax_worker(timeout=TIMEOUT_S)
    def fresh(trial: optuna.Trial) -> Any:
        be_alone(folder)
        x, y = trial.suggest_float("x", -1, 1), trial.suggest_int("y", 0, 9)
        return behave(kind_of(seed, index, trial.number), trial, value_of(x, y))

    warm = isolated_jax_worker(fresh.__wrapped__, timeout=TIMEOUT_S, reuse=True)

    def objective(trial: optuna.Trial) -> Any:
        note("asked", number=trial.number, kind=kind_of(seed, index, trial.number))
        error: BaseException | None = None
        try:
            return (warm if trial.number % 3 == 0 else fresh)(trial)
        except BaseException as caught:
            error = caught
            raise
        finally:
            kind = "" if error is None else type(error).__name__
            worker = getattr(error, "pid", None)
            note("done", number=trial.number, error=kind, worker=worker, text=str(error)[:300] if error else "")

    def told(_: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        note(
            "told",
            number=trial.number,
            state=trial.state.name,
            value=trial.value,
            facts=trial.user_attrs.get("jaxguard"),
        )

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{folder}/study-{index}.db", engine_kwargs={"connect_args": {"timeout": 60}}
    )
    sampler = optuna.samplers.RandomSampler(seed=seed + index)
    study = optuna.create_study(storage=storage, study_name="soak", load_if_exists=True, sampler=sampler)
    for trial in study.trials:
        if not trial.state.is_finished():  # its parent was killed, and cannot tell
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            note("left", number=trial.number)
    note("begun")
    left = trials - len(study.trials)
    if left > 0:
        study.optimize(objective, n_trials=left, n_jobs=jobs, catch=(Exception,), callbacks=[told])
    note("end")


if __name__ == "__main__":
    main()
