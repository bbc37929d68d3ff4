"""What a run says by `rank_zero_info` and `rank_zero_warn`."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """Collect the lines that are said within, and the warnings."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield lines
        lines += [str(each.message) for each in caught]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
