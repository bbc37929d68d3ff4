"""Makes the project's virtual environment; standard library alone, for it runs before anything is installed.

    python -m tools.bootstrap --venv .venv

Owns: which torch a machine gets, and that it says so. Does not own: which versions (constraints.txt), which
interpreter (the Makefile tries them), when (the Makefile compares the stamp).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = "dev,hf,peft,tokenizers,parquet,plot"
PROBE_S = 3.0
STATUS_S = 15.0  # how often a log without a terminal gets a line


class BootstrapError(Exception):
    """The environment could not be made; the message is for the user."""


@dataclass(frozen=True)
class TorchSource:
    """Where torch comes from: pip's extra arguments for that one step, and the reason to print."""

    reason: str
    pip_arguments: list[str] = field(default_factory=list)


def has_nvidia_driver() -> bool:
    """Whether this machine could use torch's CUDA build."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def answers(url: str, timeout_s: float = PROBE_S) -> bool:
    """Whether `url` answers with success within the time; in a thread, since a name look-up knows no timeout."""
    successes: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s) as reply:
                successes.append(reply.status == 200)
        except (OSError, urllib.error.URLError, ValueError):
            successes.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return successes == [True]


def choose_torch_source(installed: str | None, pinned: str | None, cpu_index: str = CPU_INDEX) -> TorchSource:
    """Choose so that a machine without an NVIDIA driver does not download CUDA.

    Args:
        installed: Version of torch in the environment, or None.
        pinned: Version that the constraints ask for, or None.
        cpu_index: Address of torch's own index of CPU builds.
    """
    if installed is not None and installed.split("+")[0] == (pinned or installed).split("+")[0]:
        return TorchSource(f"{installed} is installed already")
    if platform.system() != "Linux":
        return TorchSource(f"{platform.system()} has one build of torch, from your package index")
    if has_nvidia_driver():
        return TorchSource("an NVIDIA driver was found: the CUDA build, from your package index")
    if answers(f"{cpu_index}/torch/"):
        return TorchSource(
            f"no NVIDIA driver was found: the CPU build, from {cpu_index}", ["--extra-index-url", cpu_index]
        )
    return TorchSource(
        f"no NVIDIA driver was found, but {cpu_index} gave no answer within {PROBE_S:.0f} s: whichever build your pip "
        "configuration finds. From PyPI that is the CUDA build, several GB; PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL "
        "can name a place with the CPU build"
    )


def pinned_version(constraints: Path, package: str) -> str | None:
    """Return the version that a line `package==version` of the constraints names, or None."""
    match = re.search(rf"^{re.escape(package)}==(\S+)", constraints.read_text(), flags=re.MULTILINE)
    return match.group(1) if match else None


def python_in(venv: Path) -> Path:
    """Return the environment's interpreter."""
    return venv / "bin" / "python"


def output_of(command: Sequence[str | Path]) -> str | None:
    """Return what the command printed, or None when it failed or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def installed_version(venv: Path, package: str) -> str | None:
    """Return the version of a package in the environment, or None."""
    return output_of([python_in(venv), "-c", f"from importlib.metadata import version; print(version({package!r}))"])


def make_venv(venv: Path, *, same_python: bool) -> None:
    """Make the environment with the running interpreter, unless a usable one is there.

    Args:
        venv: Its folder.
        same_python: Replace an environment of another Python version (the user named an interpreter).
    """
    running = ".".join(map(str, sys.version_info[:3]))
    found = output_of([python_in(venv), "-c", "import sys; print('.'.join(map(str, sys.version_info[:3])))"])
    if found is not None and (found == running or not same_python):
        print(f"environment: {venv} (Python {found})", flush=True)
        return
    if venv.exists():
        if not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
            raise BootstrapError(f"{venv} exists and is no virtual environment: move it away, or choose VENV=another.")
        print(
            f"environment: replacing {venv} ({f'Python {found}' if found else 'its interpreter is gone'})", flush=True
        )
        shutil.rmtree(venv)
    print(f"environment: making {venv} with {sys.executable} (Python {running})", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)


def pip_install(venv: Path, arguments: Sequence[str], *, log: Path) -> None:
    """Run `pip install`, with one line of progress; its whole output goes to `log`, its end is shown on failure.

    Raises:
        BootstrapError: when pip fails.
    """
    command = [str(python_in(venv)), "-m", "pip", "install", "--progress-bar", "off", *arguments]
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    last_lines: deque[str] = deque(maxlen=40)
    status = _StatusLine()
    with (
        log.open("a") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process,
    ):
        file.write(f"$ {' '.join(command)}\n")
        for line in process.stdout or ():
            file.write(line)
            last_lines.append(line)
            if re.match(r"\s*(Collecting|Downloading|Using cached|Building|Preparing|Installing|Processing)\b", line):
                status.show(line.strip())
    status.end()
    if process.returncode != 0:
        raise BootstrapError("".join(last_lines) + f"pip failed (its whole output: {log})")


class _StatusLine:
    """On a terminal one line that is rewritten; in a log a line every `STATUS_S` seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._width = shutil.get_terminal_size().columns - 1
        self._next_s = time.monotonic() + STATUS_S
        self._start_s = time.monotonic()

    def show(self, text: str) -> None:
        line = f"  {time.monotonic() - self._start_s:4.0f} s  {text}"[: self._width]
        if self._terminal:
            print(f"\r\x1b[K{line}", end="", flush=True)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + STATUS_S
            print(line, flush=True)

    def end(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", flush=True)


def bootstrap(venv: Path, *, constraints: Path, extras: str, same_python: bool = False) -> None:
    """Make or refresh the environment: torch first, from the place chosen for it, then the project, editable.

    Raises:
        BootstrapError: when `venv` is something else, or pip fails.
    """
    start_s = time.monotonic()
    make_venv(venv, same_python=same_python)
    log = venv / "bootstrap.log"
    log.unlink(missing_ok=True)
    pinned = pinned_version(constraints, "torch")
    source = choose_torch_source(installed_version(venv, "torch"), pinned)
    print(f"torch {pinned or ''}: {source.reason}", flush=True)
    # setuptools comes along so that the project's own build needs no environment, and no network, of its own.
    pip_install(venv, ["-c", str(constraints), *source.pip_arguments, "torch", "setuptools>=77"], log=log)
    project = f"{Path(__file__).resolve().parents[1]}[{extras}]"
    print(f"lightning-sp [{extras}] and what it needs, from your package index", flush=True)
    # Editable by path: setuptools' default, a finder, hides hydra_plugins from Hydra's search for plugins.
    editable = ["--no-build-isolation", "--config-settings", "editable_mode=compat", "-e", project]
    pip_install(venv, ["-c", str(constraints), *editable], log=log)
    print(f"environment ready in {time.monotonic() - start_s:.0f} s: {venv}", flush=True)


def main() -> int:
    """Parse the command line, make the environment, leave the stamp."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--constraints", type=Path, default=Path("constraints.txt"))
    parser.add_argument("--extras", default=EXTRAS)
    parser.add_argument("--same-python", action="store_true", help="replace an environment of another Python")
    options = parser.parse_args()
    try:
        bootstrap(options.venv, constraints=options.constraints, extras=options.extras, same_python=options.same_python)
    except BootstrapError as error:
        print(error, file=sys.stderr)
        return 1
    (options.venv / ".stamp").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
