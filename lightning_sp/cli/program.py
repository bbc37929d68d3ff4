"""How this program was started, and where its configuration is."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path

CONFIG_PATH, CONFIG_NAME = "pkg://lightning_sp.conf", "train"


def silence_upstream() -> None:
    """Hide what no user of this package can act upon."""
    # Lightning 2.6 asks torch's pytree in a way that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)


def program() -> list[str]:
    """Return how this program was started: its name where that is found on the path, else interpreter and file."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return [sys.executable, "-m", main.__spec__.name.removesuffix(".__main__")]
    name = Path(sys.argv[0]).name
    found = shutil.which(name)
    is_same = found is not None and Path(found).resolve() == Path(sys.argv[0]).resolve()
    return [name] if is_same else [sys.executable, os.path.abspath(sys.argv[0])]
