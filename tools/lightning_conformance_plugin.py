"""The pytest plugin of `tools/lightning_conformance.py`: Lightning's tests, their strategy replaced by this package's; what became of each.

    LIGHTNING_SP_CONFORMANCE   `{"mode": "plain" | "dp" | "sp", "answers": FILE, "scratch": FOLDER}`

What is replaced, and all that is: a strategy that a Trainer on the CPU is given or chooses, where that is `ddp`, `ddp_spawn`, `ddp_fork`,
`ddp_notebook`, one of their kin with `find_unused_parameters`, a DDPStrategy or a ModelParallelStrategy. With `"dp"` all ranks are
data-parallel, with `"sp"` all share one sequence; of a ModelParallelStrategy's own degrees data-parallel ones are kept, and tensor-parallel
ones become sequence-parallel ones. Ranks are started by running the test again (`ddp`'s way), whatever the test names. Tests that ask for GPUs
run on as many CPU ranks, in all modes. `tmp_path` is one folder for all ranks.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch.utilities.testing as lightning_testing
import pytest
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_sp import SequenceParallelStrategy

VARIABLE = "LIGHTNING_SP_CONFORMANCE"
TOLD: dict[str, str] = json.loads(os.environ.get(VARIABLE, '{"mode": "plain", "answers": "", "scratch": ""}'))
MODE = TOLD["mode"]
ABOUT = re.compile(r"ddp|DDP|ModelParallel")
TIMEOUT_S = 60.0
_RANK = int(os.environ.get("LOCAL_RANK", "0"))
_made: list[str] = []
_on_cpu: list[bool] = [False]


def replaced(strategy: Any, mode: str) -> Any:
    """Return what stands for a strategy of Lightning."""
    backend = getattr(strategy, "_process_group_backend", None)
    degrees: dict[str, Any] = {"data_parallel_size": "auto", "sequence_parallel_size": 1}
    if isinstance(strategy, ModelParallelStrategy):
        backend = None
        own = strategy._data_parallel_size, strategy._tensor_parallel_size
        degrees = {"data_parallel_size": 1 if own[0] == "auto" else own[0], "sequence_parallel_size": own[1]}
        degrees["save_distributed_checkpoint"] = strategy._save_distributed_checkpoint
    elif mode == "sp":
        degrees = {"data_parallel_size": 1, "sequence_parallel_size": "auto"}
    new = SequenceParallelStrategy(
        process_group_backend=backend, timeout_s=TIMEOUT_S, start_timeout_s=TIMEOUT_S, **degrees
    )
    new._replaces = strategy
    return new


def _is_replaced(flag: Any) -> bool:
    if isinstance(flag, str):
        return flag.startswith("ddp")
    return isinstance(flag, (DDPStrategy, ModelParallelStrategy))


def _patch_connector() -> None:
    connector: Any = _AcceleratorConnector
    init, init_strategy = connector.__init__, connector._init_strategy

    @wraps(init)
    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(init).bind(self, *args, **kwargs)
        if _on_cpu[0]:
            devices = given.arguments.get("devices", "auto")
            given.arguments["accelerator"] = "cpu"
            given.arguments["devices"] = len(devices) if isinstance(devices, (list, tuple)) else devices
        init(*given.args, **given.kwargs)

    def with_ours(self: Any) -> None:
        if _is_replaced(self._strategy_flag) and isinstance(self.accelerator, CPUAccelerator):
            name = self._strategy_flag if isinstance(self._strategy_flag, str) else type(self._strategy_flag).__name__
            _made.append(name)
            if MODE != "plain":
                self._strategy_flag = replaced(self._strategy_flag, MODE)
        init_strategy(self)

    connector.__init__, connector._init_strategy = on_cpu, with_ours


def _note_launches() -> None:
    """Note which tests start a run: in a process of their own, for a rank is started by running that again."""
    for kind in (_Launcher, *_Launcher.__subclasses__()):
        if "launch" not in vars(kind) or getattr(kind.launch, "__isabstractmethod__", False):
            continue

        def noted(self: Any, *args: Any, launch: Any = kind.launch, **kwargs: Any) -> Any:
            _made.append("launched")
            return launch(self, *args, **kwargs)

        kind.launch = noted  # type: ignore[method-assign]


def pytest_configure(config: Any) -> None:
    """Let tests run that want GPUs, or a process of their own, and replace strategies."""
    reasons: Any = lightning_testing._runif_reasons

    @wraps(reasons)
    def lifted(**wants: Any) -> Any:
        found, marks = reasons(
            **{name: of for name, of in wants.items() if name not in ("min_cuda_gpus", "standalone")}
        )
        return found, {**marks, **{name: True for name in ("min_cuda_gpus", "standalone") if wants.get(name)}}

    vars(lightning_testing)["_runif_reasons"] = lifted
    _patch_connector()
    if MODE == "plain":
        _note_launches()


def _wants(item: Any, name: str) -> bool:
    return any(mark.kwargs.get(name) for mark in item.iter_markers("skipif"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any], config: Any) -> None:
    """Keep the tests that are about these strategies, and say which they are."""
    kept = [each for each in items if hasattr(each, "function") and _is_about(each)]
    items[:] = kept
    if config.option.collectonly and TOLD["answers"]:
        with open(TOLD["answers"], "a") as file:
            for each in kept:
                gpu, alone = _wants(each, "min_cuda_gpus"), _wants(each, "standalone")
                file.write(json.dumps({"test": each.nodeid, "alone": alone or gpu, "gpu": gpu}) + "\n")


def _is_about(item: Any) -> bool:
    parameters = repr(item.callspec.params) if hasattr(item, "callspec") else ""
    return ABOUT.search(inspect.getsource(item.function) + parameters) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """Begin a test's notes; one that makes the strategy itself gets ours."""
    _made.clear()
    _on_cpu[0] = _wants(item, "min_cuda_gpus")
    if MODE != "plain" and item.path.name == "test_model_parallel.py":
        item.module.ModelParallelStrategy = lambda **options: replaced(ModelParallelStrategy(**options), MODE)
    if item.path.name == "test_model_parallel.py":
        _made.append("ModelParallelStrategy")


@pytest.fixture
def tmp_path(request: Any) -> Path:
    """Give all ranks one folder, as a started function's arguments do."""
    folder = Path(TOLD["scratch"]) / re.sub(r"\W", "_", request.node.nodeid)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Write down what became of a test, or of a rank of it."""
    error = call.excinfo
    skipped = error is not None and issubclass(error.type, pytest.skip.Exception)
    if call.when != "call" and error is None:
        return
    if call.when == "teardown" and skipped:
        return
    outcome = "passed" if error is None else "skipped" if skipped else "failed"
    note = {"test": item.nodeid, "outcome": outcome, "rank": _RANK, "when": call.when, "made": sorted(set(_made))}
    if error is not None:
        last = error.traceback[-1]
        note["reason"] = f"{error.type.__name__}: {' '.join(str(error.value).split())}"
        note["where"] = f"{Path(str(last.path)).name}:{last.lineno + 1}"
        own = next((each for each in reversed(error.traceback) if Path(str(each.path)) == item.path), last)
        note["statement"] = " ".join(str(own.statement).split())
    with open(TOLD["answers"], "a") as file:
        file.write(json.dumps(note) + "\n")
    sys.stdout.flush()
