"""A Hydra application of one's own that reuses lightning_sp's configuration groups.

    python examples/train_hydra.py                                        two processes, short sequences
    python examples/train_hydra.py strategy.ring_size=2 model=gpt_tiny
    python examples/train_hydra.py --cfg job                              what would run

Its own configuration, train_hydra.yaml beside this file, names the groups it takes from the package and changes some
values. `lightning-sp-train` is the same with more around it: report, resume, sweeps.
"""

import hydra
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path=".", config_name="train_hydra")
def main(config: DictConfig) -> None:
    seed_everything(config.seed)
    strategy = instantiate(config.strategy, _convert_="all")
    trainer = instantiate(config.trainer, strategy=strategy, _convert_="all")
    trainer.fit(instantiate(config.model, _convert_="all"), datamodule=instantiate(config.data, _convert_="all"))
    if trainer.is_global_zero:
        print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
