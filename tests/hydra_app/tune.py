"""An application as Hydra's users write them: it says all that a job can know, guarded or not."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import time
from dataclasses import dataclass, field
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd, to_absolute_path
from omegaconf import DictConfig, OmegaConf, ValidationError

from jaxguard import gpu_slot, isolated_jax_worker


@dataclass
class Model:
    """Part of the structured configuration."""

    width: int = 8
    name: str = "${hydra:job.name}"


@dataclass
class Config:
    """The structured configuration."""

    lr: float = 0.1
    model: Model = field(default_factory=Model)
    double: str = "${mul2:${lr}}"
    fail: bool = False
    together: int = 0
    folder: str = ""


ConfigStore.instance().store(name="base", node=Config)
OmegaConf.register_new_resolver("mul2", lambda x: 2 * float(x))
log = logging.getLogger(__name__)


def facts(cfg: DictConfig) -> dict[str, Any]:
    """All that a job can know of its configuration and of Hydra."""
    job = HydraConfig.get()
    try:
        cfg.lr = "much"
        checked = False
    except ValidationError:
        checked = True
    return {
        "lr": cfg.lr,
        "type": str(OmegaConf.get_type(cfg).__name__),
        "model": OmegaConf.to_container(cfg.model, resolve=True),
        "double": cfg.double,
        "is_checked": checked,
        "name": job.job.name,
        "number": job.job.get("num", None),
        "overrides": list(job.overrides.task),
        "output": pathlib.Path(job.runtime.output_dir).name,
        "cwd": os.getcwd(),
        "original_cwd": get_original_cwd(),
        "absolute": to_absolute_path("data"),
        "env_set": os.environ.get("FROM_HYDRA"),
    }


def job(cfg: DictConfig) -> dict[str, Any]:
    """Write down all that it knows, meet the others if it shall, and fail if it shall."""
    log.info("this job has lr %s", cfg.lr)
    logging.getLogger("of.a.library").warning("and a library says %s", cfg.lr)
    with gpu_slot() as slot:
        device = slot.devices[0].id
    found = facts(cfg)
    if cfg.together:
        folder = pathlib.Path(cfg.folder)
        (folder / str(HydraConfig.get().job.num)).write_text(device)
        until = time.monotonic() + 60
        while len(list(folder.iterdir())) < cfg.together and time.monotonic() < until:
            time.sleep(0.01)
    if cfg.fail:
        raise LookupError("the job has failed on purpose")
    (pathlib.Path(HydraConfig.get().runtime.output_dir) / "facts.json").write_text(json.dumps(found))
    print(json.dumps({"pid": os.getpid(), "device": device}), flush=True)
    return found


if os.environ.get("GUARDED", "1") == "1":
    job = isolated_jax_worker(job)

main = hydra.main(version_base=None, config_path="conf", config_name="config")(job)

if __name__ == "__main__":
    main()
