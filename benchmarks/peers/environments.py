"""Virtual environments of competitors that this project's own does not hold, below `.venv-peers/`, made on first use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".venv-peers"
TORCH = "torch==2.13.0"
DEEPSPEED = ((TORCH, "numpy", "setuptools", "wheel"), ("--no-build-isolation", "deepspeed==0.19.8"))
DEEPSPEED_ENVIRON = (("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0"), ("DS_LOG_LEVEL", "error"))


def interpreter(
    name: str,
    packages: Sequence[Sequence[str]],
    environ: Mapping[str, str],
    patch: Callable[[Path], None] | None = None,
) -> str:
    """Return the Python of an environment; make it where there is none.

    Args:
        name: of its folder.
        packages: each a pip command's arguments; empty for this project's own environment.
        environ: of pip.
        patch: what is changed in the folder to run the competitor here.
    """
    if not packages:
        return sys.executable
    folder = FOLDER / name
    python, stamp = folder / "bin" / "python", folder / ".ready"
    if not stamp.exists():
        print(f"making the environment of {name}: {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        for each in packages:
            command = [str(python), "-m", "pip", "install", "-q", *each]
            subprocess.run(command, check=True, env={**os.environ, **environ})
        if patch is not None:
            patch(folder)
        stamp.touch()
    return str(python)
