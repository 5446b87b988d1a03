"""An application whose guarded main returns what a sweeper is to make small."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from jaxguard import isolated_jax_worker


@hydra.main(version_base=None)
@isolated_jax_worker
def main(cfg: DictConfig) -> float:
    import jax

    return float(jax.jit(lambda x: (x - 0.3) ** 2)(cfg.x))


if __name__ == "__main__":
    main()
