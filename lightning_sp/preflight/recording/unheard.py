"""What a step prints in a trial, which is not of its run; and what it logs and saves while it is shown numbers that it never had.

if batch_idx % 10 == 0: print(loss)                                        a trial runs the step several times
if loss.item() > 50: log.error("diverged"); torch.save(batch, "bad.pt")    it is not
"""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def prints_held() -> Iterator[Callable[[], None]]:
    """Print nothing within, but what the last run has printed where it ends in an error.

    A debugger writes to the terminal by itself.

    Yields:
        What forgets the runs so far, as the next one begins.
    """
    own, held = builtins.print, list[str]()

    def hold(
        *values: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False
    ) -> None:
        if file in (None, sys.stdout):
            held.append((" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end))
        else:
            own(*values, sep=sep, end=end, file=file, flush=flush)

    builtins.print = hold
    try:
        yield held.clear
    except BaseException:
        own(*held, sep="", end="", flush=True)
        raise
    finally:
        builtins.print = own


@contextmanager
def unheard(trainer: Any) -> Iterator[None]:
    """Within, log nothing, and save no checkpoint and no tensor.

    Args:
        trainer: of the run.
    """
    save, of_trainer, loggers = torch.save, vars(trainer).get("save_checkpoint"), _loggers_of_user()
    trainer.save_checkpoint = torch.save = _not_written
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in loggers:
            logger.disabled = False
        torch.save = save
        if of_trainer is None:
            del trainer.save_checkpoint
        else:
            trainer.save_checkpoint = of_trainer


def _loggers_of_user() -> list[logging.Logger]:
    """Return what logs now, but what Lightning and this package say."""
    known = [
        logging.root,
        *(each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)),
    ]
    return [each for each in known if not each.disabled and not each.name.startswith(("lightning", "torch"))]


def _not_written(*_: Any, **__: Any) -> None:
    """Save nothing."""
