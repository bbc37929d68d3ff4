"""Runs models of other libraries in the global view, each library in a folder of its own beside this environment's packages.

    python -m tools.library_blocks                     all of them, installed on first use
    python -m tools.library_blocks torchtune           one

Owns what is installed. Does not own the models and what is compared (tests/global_view/models/library_blocks.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-blocks"
# Without what these depend on: torch and the rest are this environment's, and what an import asks for besides is named.
PACKAGES = {
    "x-transformers": (
        *("x-transformers==2.31.10", "einops==0.8.2", "einx==0.4.3", "loguru==0.7.3", "frozendict==2.5.1"),
        "torch-einops-utils",
    ),
    "litgpt": ("litgpt==0.5.13",),
    "torchtune": ("torchtune==0.6.1", "torchao==0.10.0", "sentencepiece", "tiktoken"),
}


def folder_of(library: str) -> Path:
    """Return the folder of a library; install it where it is not."""
    folder = FOLDER / library
    stamp = folder / ".ready"
    if not stamp.exists():
        print(f"installing {library}: {folder}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, *PACKAGES[library]], check=True)
        stamp.touch()
    return folder


def run(library: str) -> int:
    """Run a library's models at each layout; return what pytest gives."""
    path = os.pathsep.join([str(ROOT), str(folder_of(library))])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/global_view/test_modules.py",
        "-k",
    ]
    return subprocess.run(
        [*command, f"other_libraries and {library}"], cwd=ROOT, check=False, env={**os.environ, "PYTHONPATH": path}
    ).returncode


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("libraries", nargs="*", default=list(PACKAGES), help=", ".join(PACKAGES))
    libraries = parser.parse_args().libraries
    if unknown := [each for each in libraries if each not in PACKAGES]:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(PACKAGES)}")
    results = [run(each) for each in libraries]
    sys.exit(max(results))


if __name__ == "__main__":
    main()
