"""The command that continues a run, and paths as they are typed in the folder where it was started."""

from __future__ import annotations

import os
import re
import shlex

IN_PYTHON = "trainer.fit(..., ckpt_path={checkpoint!r}), with Trainer(max_steps={max_steps})"


def fill_resume_command(template: str, *, checkpoint: str, folder: str, max_steps: int) -> str:
    """Put a run's paths, quoted for a shell, in a command; its other braces stay.

    Args:
        template: with ``{checkpoint}`` (or ``{checkpoint!r}``, in Python), ``{folder}`` and ``{max_steps}``.
        checkpoint: where to continue.
        folder: the run's.
        max_steps: where to stop.
    """
    command = template
    for name, value in (
        ("{checkpoint!r}", repr(checkpoint)),
        ("{checkpoint}", shlex.quote(checkpoint)),
        ("{folder}", shlex.quote(folder)),
        ("{max_steps}", str(max_steps)),
    ):
        command = command.replace(name, value)
    return command


def shorten_paths(text: str, folder: str) -> str:
    """Write the absolute paths below a folder relative to it, wherever one begins in a text."""
    return re.sub(rf"(?<![\w./-]){re.escape(folder.rstrip(os.sep) + os.sep)}(?=[^\s'\"])", "", text)
