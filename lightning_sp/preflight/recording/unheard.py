"""What a step says, and the checkpoints it writes, while it is shown numbers that it never had: neither is of its run.

if loss.item() > 50: print("diverged"); torch.save(batch, "bad_batch.pt")
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch


@contextmanager
def unheard(trainer: Any) -> Iterator[None]:
    """Within, print and log nothing, and save no checkpoint and no tensor.

    Args:
        trainer: of the run.
    """
    level, save, of_trainer = logging.root.manager.disable, torch.save, vars(trainer).get("save_checkpoint")
    trainer.save_checkpoint = torch.save = _not_written
    logging.disable()
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
        torch.save = save
        if of_trainer is None:
            del trainer.save_checkpoint
        else:
            trainer.save_checkpoint = of_trainer


def _not_written(*_: Any, **__: Any) -> None:
    """Save nothing."""
