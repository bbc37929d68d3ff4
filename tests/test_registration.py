"""The name `sequence_parallel`: known without an import of ours, and never in the way of torch or Lightning.

Each test is one fresh interpreter with a site folder of its own in front: the autoload module, the metadata that names
its entry point, and a lightning_sp that is whole, broken or absent.
"""

import copy
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lightning_sp import SequenceParallelStrategy

ROOT = Path(__file__).parents[1]
REGISTRY = "from lightning.pytorch.strategies import StrategyRegistry"

# An editable install would otherwise provide the real lightning_sp where the site folder holds none.
ONLY_THE_SITE_FOLDER = """
import os, sys
sys.path[:] = [folder for folder in sys.path if not os.path.exists(folder + "/lightning_sp/py.typed")]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""

STRATEGY = """
from lightning.pytorch.strategies import SingleDeviceStrategy
class SequenceParallelStrategy(SingleDeviceStrategy):
    def __init__(self):
        super().__init__(device="cpu")
"""

BROKEN = {
    "raises": "raise RuntimeError('broken on purpose')",
    "unparsable": "def broken(:",
    "deleted": None,
}


@pytest.fixture
def site(tmp_path):
    """A site folder as an installed wheel leaves it, without lightning_sp itself."""
    site = tmp_path / "site"
    info = site / "lightning_sp-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-sp\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nlightning_sp = lightning_sp_autoload:register\n")
    (site / "lightning_sp_autoload.py").write_text((ROOT / "lightning_sp_autoload.py").read_text())
    return site


def write_package(site, init, strategy=STRATEGY):
    package = site / "lightning_sp"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    (package / "strategy.py").write_text(strategy)
    (package / "errors.py").write_text((ROOT / "lightning_sp/errors.py").read_text())
    (package / "registration.py").write_text((ROOT / "lightning_sp/registration.py").read_text())


def python(site, script, **env):
    """Run `script` in a fresh interpreter that sees the site folder first; return what it printed."""
    path = site.parent / "script.py"
    path.write_text(ONLY_THE_SITE_FOLDER + textwrap.dedent(script))
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(path)],
        env=environment | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"} | env,
        cwd=site.parent,
        capture_output=True,
        text=True,
        timeout=240,  # seconds on an idle machine, minutes on a crowded one
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# A package that raises is part of the next test too, and one that is absent.
@pytest.mark.slow
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_package_breaks_neither_torch_nor_lightning(site, fault):
    init = BROKEN[fault]
    if init is not None:
        write_package(site, init)
    out = python(
        site,
        f"""
        import torch
        torch.ones(2).sum()
        import importlib.util
        print("present", importlib.util.find_spec("lightning_sp") is not None)
        {REGISTRY}
        print("known", "sequence_parallel" in StrategyRegistry, "lightning_sp" in sys.modules)
        import traceback
        from lightning.pytorch import Trainer
        try:
            Trainer(strategy="sequence_parallel", accelerator="cpu", logger=False)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        """,
    )
    assert f"present {init is not None}" in out
    assert "known True False" in out
    expected = {
        "raises": "RuntimeError: broken on purpose",
        "unparsable": "SyntaxError",
        "deleted": "ModuleNotFoundError: No module named 'lightning_sp'",
    }
    assert expected[fault] in out
    if init is not None:
        assert str(site / "lightning_sp/__init__.py") in out, "the traceback must lead to the fault"


@pytest.mark.slow
def test_lightning_looks_as_without_us_and_the_name_creates_the_strategy_here_and_in_a_spawned_process(site):
    """The watched module keeps its loader, source and pickles; reload and repeated registration are harmless.

    The package is broken at first, then absent: what is wrong with it shows when the strategy is asked for, and not before.
    """
    write_package(site, BROKEN["raises"])
    later = site.parent / "later"
    later.mkdir()
    write_package(later, "from lightning_sp.registration import register_strategy\nregister_strategy()\n")
    out = python(
        site,
        """
        import importlib, importlib.util, inspect, multiprocessing, pickle, pkgutil, shutil, traceback
        from importlib.machinery import SourceFileLoader
        from pathlib import Path

        def create(where):
            from lightning.pytorch import Trainer
            assert "lightning_sp" not in sys.modules
            trainer = Trainer(strategy="sequence_parallel", accelerator="cpu", devices=1, logger=False)
            print(where, type(trainer.strategy).__module__, flush=True)

        def looks():
            import torch, lightning_sp_autoload
            torch.ones(2).sum()
            for _ in range(2):
                lightning_sp_autoload.register()
            importlib.reload(lightning_sp_autoload).register()
            assert sum(type(f).__name__ == "_StrategiesFinder" for f in sys.meta_path) == 1

            name = "lightning.pytorch.strategies"
            import lightning.pytorch.strategies as strategies
            spec = strategies.__spec__
            for loader in (spec.loader, strategies.__loader__):
                assert type(loader) is SourceFileLoader and "exec_module" not in vars(loader)
            assert "StrategyRegistry" in inspect.getsource(strategies)
            assert pkgutil.get_data(name, "__init__.py")
            assert pickle.loads(pickle.dumps(spec.loader)).path == spec.loader.path
            assert importlib.util.find_spec(name) is spec
            found = sys.meta_path[0].find_spec(name, sys.modules["lightning.pytorch"].__path__)
            assert type(found.loader) is SourceFileLoader and found.origin == spec.origin
            fresh = importlib.util.module_from_spec(found)
            found.loader.exec_module(fresh)
            assert "sequence_parallel" in fresh.StrategyRegistry
            assert strategies.StrategyRegistry["sequence_parallel"]["strategy"].__name__ == "create_strategy"
            lightning_sp_autoload.register()

        def stays():
            import lightning.pytorch.strategies as strategies
            import lightning_sp, lightning_sp_autoload
            registry = strategies.StrategyRegistry
            ours = sys.modules["lightning_sp.strategy"].SequenceParallelStrategy
            assert registry["sequence_parallel"]["strategy"] is ours
            lightning_sp.register_strategy()
            lightning_sp_autoload.register()
            assert registry["sequence_parallel"]["strategy"] is ours

            importlib.reload(strategies)
            assert strategies.StrategyRegistry is not registry
            assert "sequence_parallel" in strategies.StrategyRegistry
            print("same")

        if __name__ == "__main__":
            assert importlib.util.find_spec("lightning_sp") is not None
            looks()
            try:
                create("broken")
            except RuntimeError as error:
                print(error, "in", traceback.extract_tb(error.__traceback__)[-1].filename)
            site = Path(sys.modules["lightning_sp_autoload"].__file__).parent
            shutil.rmtree(site / "lightning_sp")
            importlib.invalidate_caches()
            assert importlib.util.find_spec("lightning_sp") is None
            try:
                create("absent")
            except ModuleNotFoundError as error:
                print(error)
            shutil.move(site.parent / "later" / "lightning_sp", site)
            importlib.invalidate_caches()
            create("parent")
            stays()
            child = multiprocessing.get_context("spawn").Process(target=create, args=("child",))
            child.start()
            child.join()
            assert child.exitcode == 0
        """,
    )
    assert out.splitlines() == [
        f"broken on purpose in {site / 'lightning_sp/__init__.py'}",
        "No module named 'lightning_sp'",
        "parent lightning_sp.strategy",
        "same",
        "child lightning_sp.strategy",
    ]


@pytest.mark.slow
def test_autoload_switched_off_leaves_the_import_of_ours_which_takes_no_name_from_others(site):
    """So does `register` after the fact, at once; pytorch_lightning, whose classes differ, is refused by name."""
    write_package(site, "from lightning_sp.registration import register_strategy\nregister_strategy()\n")
    out = python(
        site,
        f"""
        import warnings
        {REGISTRY}
        print("before", "sequence_parallel" in StrategyRegistry, "lightning_sp_autoload" in sys.modules)
        import lightning_sp
        print("after", StrategyRegistry["sequence_parallel"]["strategy"].__module__)

        def theirs():
            return None

        StrategyRegistry.register("sequence_parallel", theirs, override=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lightning_sp.register_strategy()
        print(caught[0].message)
        assert StrategyRegistry["sequence_parallel"]["strategy"] is theirs

        del StrategyRegistry["sequence_parallel"]
        import lightning_sp_autoload
        lightning_sp_autoload.register()
        assert StrategyRegistry["sequence_parallel"]["strategy"] is lightning_sp_autoload.create_strategy
        import pytorch_lightning
        try:
            pytorch_lightning.Trainer(strategy="sequence_parallel", accelerator="cpu", logger=False)
        except ValueError as error:
            print(type(error).__name__, error)
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert out.split("\n")[:2] == ["before False False", "after lightning_sp.strategy"]
    assert "is registered already, by __main__, and stays that" in out
    assert "SequenceParallelError strategy='sequence_parallel' was given to pytorch_lightning's Trainer" in out


def test_the_module_that_torch_loads_imports_the_standard_library_alone():
    script = "import sys; import lightning_sp_autoload; print(*{name.split('.')[0] for name in sys.modules})"
    result = subprocess.run(
        [sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    foreign = set(result.stdout.split()) - set(sys.stdlib_module_names) - {"__main__", "lightning_sp_autoload"}
    assert not foreign


def test_a_strategy_can_be_copied_before_its_run():
    copied = copy.deepcopy(SequenceParallelStrategy(ulysses_size=2, timeout_s=7))
    assert copied.config == SequenceParallelStrategy(ulysses_size=2, timeout_s=7).config
