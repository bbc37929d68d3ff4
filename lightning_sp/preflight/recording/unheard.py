"""What a step prints and logs in a trial, which is not of its run; and what it saves while it is shown numbers that it never had.

if batch_idx % 10 == 0: print(loss); log.info(loss)                        a trial runs the step several times
if loss.item() > 50: log.error("diverged"); torch.save(batch, "bad.pt")    it is not
"""

from __future__ import annotations

import builtins
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from lightning_sp.preflight.recording.users_lines import INSTALLED

# Loggers that say what the user is to know of a trial.
_KNOWN = ("lightning", "torch")


@contextmanager
def prints_held() -> Iterator[Callable[[], None]]:
    """Print and log nothing of the user's within, but what the last run has where it ends in an error.

    A debugger writes to the terminal by itself. What libraries log stays: some say a thing once.

    Yields:
        What forgets the runs so far, as the next one begins.
    """
    own, handle, thread = builtins.print, logging.Logger.callHandlers, threading.get_ident()
    held: list[Callable[[], None]] = []

    def hold(
        *values: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False
    ) -> None:
        if file in (None, sys.stdout, sys.stderr):
            text = (" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end)
            held.append(partial(own, text, end="", file=file, flush=True))
        else:
            own(*values, sep=sep, end=end, file=file, flush=flush)

    def hold_record(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.thread == thread and _is_of_user(record):
            held.append(partial(handle, logger, record))
        else:
            handle(logger, record)

    builtins.print = hold
    logging.Logger.callHandlers = hold_record  # type: ignore[assignment, method-assign]
    try:
        yield held.clear
    except BaseException:
        for let_out in held:
            let_out()
        raise
    finally:
        builtins.print, logging.Logger.callHandlers = own, handle  # type: ignore[method-assign]


def _is_of_user(record: logging.LogRecord) -> bool:
    is_known = record.name.startswith(_KNOWN) or any(folder in record.pathname for folder in INSTALLED)
    return not is_known


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
    return [each for each in known if not each.disabled and not each.name.startswith(_KNOWN)]


def _not_written(*_: Any, **__: Any) -> None:
    """Save nothing."""
