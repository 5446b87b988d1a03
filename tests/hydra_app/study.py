"""An application that builds its own Optuna study, and guards the objective."""

from __future__ import annotations

import os

import hydra
import optuna
from omegaconf import DictConfig

from jaxguard import isolated_jax_worker


@hydra.main(version_base=None, config_path="conf", config_name="study")
def main(cfg: DictConfig) -> float:
    parent = os.getpid()

    @isolated_jax_worker
    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_float("lr", cfg.low, cfg.high)  # main's own configuration, from the closure
        composed = hydra.compose(config_name="study", overrides=[f"scale={cfg.scale + trial.number}"])
        trial.set_user_attr("scale", composed.scale)
        trial.set_user_attr("elsewhere", os.getpid() != parent)
        return lr * composed.scale

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=cfg.seed))
    study.optimize(objective, n_trials=4, n_jobs=2)
    scales = sorted(trial.user_attrs["scale"] for trial in study.trials)
    print(all(trial.user_attrs["elsewhere"] for trial in study.trials), *scales)
    return study.best_value


if __name__ == "__main__":
    main()
