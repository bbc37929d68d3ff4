"""The two commands: `lightning-sp-train` (Hydra) and `lightning-sp` (Lightning's CLI, `prepare` and `export`).

Both build a model, a DataModule and a Trainer from text and call the Trainer; nothing is decided here.
"""

from lightning_sp.cli.hydra_command import train
from lightning_sp.cli.lightning_command import main

__all__ = ["main", "train"]
