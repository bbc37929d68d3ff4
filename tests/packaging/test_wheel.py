"""What the built packages hold, read from their archives; trying them elsewhere is `make wheel`."""

import configparser
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("lightning_sp", "hydra_plugins", "conf")
SHIPPED_FILES = ("lightning_sp_autoload.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The file names in the sdist and in the wheel that is built from that sdist, and the wheel itself."""
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SHIPPED_FILES:
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "out"), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    (sdist,) = (source / "out").glob("*.tar.gz")
    (wheel,) = (source / "out").glob("*.whl")
    with tarfile.open(sdist) as tar:
        in_sdist = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    with zipfile.ZipFile(wheel) as archive:
        return in_sdist, set(archive.namelist()), wheel


def test_every_module_and_configuration_is_shipped(archives):
    in_sdist, in_wheel, _ = archives
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_sp").rglob("*.py")}
    configs = {f"lightning_sp/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    plugin = {"hydra_plugins/lightning_sp_searchpath/searchpath.py"}
    expected = modules | configs | plugin | {"lightning_sp/py.typed", "lightning_sp/conf/__init__.py"}
    expected |= {"lightning_sp_autoload.py"}
    assert configs, "no configuration was found to look for"
    assert expected <= in_wheel
    assert expected <= in_sdist


def test_nothing_else_is_shipped(archives):
    _, in_wheel, _ = archives
    top = {name.split("/")[0] for name in in_wheel if ".dist-info/" not in name}
    assert top == {"lightning_sp", "hydra_plugins", "lightning_sp_autoload.py"}
    assert "hydra_plugins/__init__.py" not in in_wheel, "it would hide every other package's Hydra plugins"


def test_the_commands_and_the_entry_point_are_named(archives):
    *_, wheel = archives
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read(name).decode())
    assert dict(entry_points["torch.backends"]) == {"lightning_sp": "lightning_sp_autoload:register"}
    assert set(entry_points["console_scripts"]) == {"lightning-sp", "lightning-sp-train"}
