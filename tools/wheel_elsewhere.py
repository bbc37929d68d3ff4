"""Builds the wheel, installs it in an environment outside the repository, and uses it there as a stranger would.

    make wheel          (python -m tools.wheel_elsewhere [--keep])

Owns the trial. Does not own what the archives hold (tests/packaging/test_wheel.py).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import bootstrap

ROOT = Path(__file__).resolve().parents[1]

IMPORT = """
import lightning_sp, sys
assert lightning_sp.__file__.startswith(sys.prefix), lightning_sp.__file__
print(lightning_sp.__file__)
"""

NAME_WITHOUT_AN_IMPORT = """
import sys
from lightning.pytorch import Trainer
assert "lightning_sp" not in sys.modules
trainer = Trainer(strategy="sequence_parallel", accelerator="cpu", devices=1, logger=False, barebones=True)
print(type(trainer.strategy))
assert type(trainer.strategy).__name__ == "SequenceParallelStrategy"
"""

CONFIGS = """
from importlib.resources import files
from hydra import compose, initialize_config_module
names = [path.name for path in files("lightning_sp.conf").iterdir() if path.name.endswith(".yaml")]
assert names, "no configuration in the wheel"
with initialize_config_module("lightning_sp.conf", version_base=None):
    for name in sorted(names):
        print(name, sorted(compose(name)))
"""

USERS_OWN_APPLICATION = """
import sys, hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base=None, config_path=None)
def main(config):
    sources = {source.provider: source.path for source in HydraConfig.get().runtime.config_sources}
    print(sources["lightning_sp"])
    assert sources["lightning_sp"].startswith(sys.prefix)
    assert "torch" not in sys.modules, "an application that uses nothing of ours must not pay for it"

main()
"""


@dataclass(frozen=True)
class Trial:
    """One command of the trial, run in an empty folder by the environment's interpreter or one of its scripts."""

    title: str
    command: Sequence[str]


TRIALS = (
    Trial("import", ("python", "-c", IMPORT)),
    Trial('Trainer(strategy="sequence_parallel") with no import of ours', ("python", "-c", NAME_WITHOUT_AN_IMPORT)),
    Trial("the configurations, through the package", ("python", "-c", CONFIGS)),
    Trial("a user's own Hydra application sees them", ("python", "app.py")),
    Trial("lightning-sp-train --cfg job", ("lightning-sp-train", "--cfg", "job")),
    Trial("lightning-sp --help", ("lightning-sp", "--help")),
)


def build_wheel(out: Path) -> Path:
    """Build the wheel from the sdist, as an index would get both."""
    source = out / "source"
    # A copy: the build leaves folders beside its source, and takes what an earlier one left there.
    shutil.copytree(
        ROOT,
        source,
        symlinks=True,
        ignore=shutil.ignore_patterns(".git", ".venv*", "build", "dist", "*.egg-info", "runs"),
    )
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    shutil.rmtree(source)
    (wheel,) = out.glob("*.whl")
    return wheel


def install(wheel: Path, venv: Path) -> None:
    """Install the wheel without extras: the core must work with what it names itself."""
    constraints = ROOT / "constraints.txt"
    log = venv.parent / "pip.log"
    bootstrap.make_venv(venv, same_python=True)
    source = bootstrap.choose_torch_source(None, bootstrap.pinned_version(constraints, "torch"))
    print(f"torch: {source.reason}", flush=True)
    bootstrap.pip_install(venv, ["-c", str(constraints), *source.pip_arguments, "torch"], log=log)
    bootstrap.pip_install(venv, ["-c", str(constraints), str(wheel)], log=log)


def try_all(venv: Path, folder: Path) -> list[str]:
    """Run every trial; return the titles of those that failed."""
    (folder / "home").mkdir(parents=True)
    (folder / "app.py").write_text(USERS_OWN_APPLICATION)
    environment = {"HOME": str(folder / "home"), "PATH": f"{venv / 'bin'}:/usr/bin:/bin", "LANG": "C.UTF-8"}
    failed = []
    for trial in TRIALS:
        executable = venv / "bin" / trial.command[0]
        result = subprocess.run(
            [executable, *trial.command[1:]],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(f"{'ok  ' if result.returncode == 0 else 'FAIL'}  {trial.title}", flush=True)
        for line in result.stdout.splitlines()[-12 if result.returncode else -3 :]:
            print(f"        {line}")
        if result.returncode != 0:
            failed.append(trial.title)
    return failed


def main() -> int:
    """Build, install, try; the folder is removed unless something failed or --keep was given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the environment for a look")
    options = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    folder = Path(tempfile.mkdtemp(prefix="lightning-sp-elsewhere-"))
    wheel = build_wheel(folder)
    print(f"built {wheel.name}, {wheel.stat().st_size / 1024:.0f} KiB", flush=True)
    install(wheel, folder / "venv")
    failed = try_all(folder / "venv", folder / "elsewhere")
    if failed or options.keep:
        print(f"left for a look: {folder}")
    else:
        shutil.rmtree(folder)
    print(f"{len(TRIALS) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
