"""The pytest plugin of `tools/lightning_conformance.py`: Lightning's tests, their strategy replaced by this package's; what became of each.

    LIGHTNING_SP_CONFORMANCE   `{"cache": FILE, "scratch": FOLDER, "only": PART OF A NAME, "gpu": true, "known": ["MODE TEST", ...]}`

What is replaced, and all that is: a strategy that a Trainer on the CPU is given or chooses, where that is `ddp`, `ddp_spawn`, `ddp_fork`,
`ddp_notebook`, one of their kin with `find_unused_parameters`, a DDPStrategy or a ModelParallelStrategy. With `"dp"` all ranks are
data-parallel, with `"sp"` all share one sequence; of a ModelParallelStrategy's own degrees data-parallel ones are kept, and tensor-parallel
ones become sequence-parallel ones. Tests that ask for GPUs run on as many CPU ranks, in all modes. `tmp_path` is one folder for all ranks, and
torch is seeded before each test.

Starting Python takes longer than most tests. So each test runs in a fork of the process that has collected it, for each mode in turn, and
where Lightning's launcher would run the script again for another rank, a fork from before the test runs the test. With Lightning's own strategy
`ddp_spawn` forks, too. A fork leaves nothing in the process that goes on.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch.utilities.testing as lightning_testing
import pytest
import torch
from _pytest.runner import runtestprotocol
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_sp import SequenceParallelStrategy

VARIABLE = "LIGHTNING_SP_CONFORMANCE"
TOLD: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
MODES = ("plain", "dp", "sp")
ABOUT = re.compile(r"ddp|DDP|ModelParallel")
TIMEOUT_S, LIMIT_S = 60.0, 150.0
_MOST_RANKS = 4
_made: list[str] = []  # what the test in progress has made or begun
_on_cpu: list[bool] = [False]
_mode: list[str] = ["plain"]
_notes: list[Path] = []


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
    new._replaces = strategy  # type: ignore[attr-defined]
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
            if _mode[0] != "plain":
                self._strategy_flag = replaced(self._strategy_flag, _mode[0])
        init_strategy(self)

    connector.__init__, connector._init_strategy = on_cpu, with_ours


def _note_launches() -> None:
    """Note which tests start a run."""
    for kind in (_SubprocessScriptLauncher, _MultiProcessingLauncher):

        def noted(self: Any, *args: Any, launch: Any = kind.launch, **kwargs: Any) -> Any:
            _made.append("launched")
            return launch(self, *args, **kwargs)

        kind.launch = noted  # type: ignore[method-assign]
    init: Any = _MultiProcessingLauncher.__init__

    def by_fork(self: Any, strategy: Any, start_method: str = "spawn") -> None:
        init(self, strategy, "fork" if start_method == "spawn" else start_method)

    _MultiProcessingLauncher.__init__ = by_fork  # type: ignore[method-assign]


def pytest_configure(config: Any) -> None:
    """Let tests run that want GPUs, or a process of their own, and replace strategies and the start of ranks."""
    reasons: Any = lightning_testing._runif_reasons

    @wraps(reasons)
    def lifted(**wants: Any) -> Any:
        found, marks = reasons(
            **{name: of for name, of in wants.items() if name not in ("min_cuda_gpus", "standalone")}
        )
        return found, {**marks, **{name: True for name in ("min_cuda_gpus", "standalone") if wants.get(name)}}

    vars(lightning_testing)["_runif_reasons"] = lifted
    vars(subprocess_script)["subprocess"] = SimpleNamespace(Popen=lambda command, env, cwd: _spare.pop().begin(env))
    _patch_connector()
    _note_launches()


class Spare:
    """A fork that waits for the environment of a rank, and runs the test as that; to a launcher it is a process like any other.

    Args:
        run: the test, which returns the code to end with.
    """

    def __init__(self, run: Callable[[], int]) -> None:
        reads, self._writes = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            os.close(reads)
            return
        os.close(self._writes)
        with open(reads) as pipe:
            told = pipe.read()
        if not told:
            os._exit(0)
        os.environ.clear()
        os.environ.update(json.loads(told))
        os._exit(run())

    def begin(self, environment: Mapping[str, str]) -> Spare:
        """Run the test as a rank."""
        os.write(self._writes, json.dumps(dict(environment)).encode())
        os.close(self._writes)
        return self

    def poll(self) -> int | None:
        """Return the code with which it has ended, None before."""
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        begun = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - begun > timeout:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, signum: int) -> None:
        """Send it a signal, if it is there."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    terminate = kill


_spare: list[Spare] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> bool:
    """Run a test with each strategy, unless an earlier call has, and write down what became of it."""
    with open(TOLD["cache"], "a") as cache:
        for mode in MODES:
            if f"{mode} {item.nodeid}" in TOLD["known"]:
                continue
            found = _outcome(item, mode)
            cache.write(json.dumps({"mode": mode, "name": item.nodeid, **found}) + "\n")
            print(f"{mode:5} {found['outcome']} {item.nodeid}", file=sys.__stderr__, flush=True)
            if mode == "plain" and not is_chosen(found):
                break
    return True


def is_chosen(plain: Mapping[str, Any] | None) -> bool:
    """Whether a test passes with Lightning's own strategy, and uses it."""
    return plain is not None and plain["outcome"] == "passed" and bool(set(plain["made"]) - {"launched"})


def _outcome(item: Any, mode: str) -> dict[str, Any]:
    """Run a test in a fork, end all that it has started, and return what became of it on its ranks: the first failure, if any."""
    scratch = Path(tempfile.mkdtemp(dir=TOLD["scratch"]))
    _notes[:], _mode[:] = [scratch / "notes"], [mode]
    pid = os.fork()
    if not pid:
        os.setsid()
        _spare[:] = [Spare(lambda: _run(item)) for _ in range(_MOST_RANKS - 1)]
        os._exit(_run(item))
    begun, code = time.monotonic(), None
    while code is None and time.monotonic() - begun < LIMIT_S:
        ended, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    notes = [json.loads(line) for line in _notes[0].read_text().splitlines()] if _notes[0].exists() else []
    shutil.rmtree(scratch, ignore_errors=True)
    failed = sorted((each for each in notes if each["outcome"] == "failed"), key=lambda each: int(each["rank"]))
    if not failed and code not in (0, 1):
        reason = f"it ended with code {code}" if code else f"it has not ended after {LIMIT_S:.0f} s"
        failed = [{"outcome": "failed", "reason": reason, "statement": ""}]
    first = next(
        iter(failed or [each for each in notes if each["rank"] == 0]),
        {"outcome": "failed", "reason": "it has said nothing"},
    )
    return {**first, "made": sorted({name for each in notes for name in each["made"]})}


def _run(item: Any) -> int:
    try:
        reports = runtestprotocol(item, nextitem=None, log=False)
    except BaseException:  # an exit within a hook of pytest
        return 2
    return int(any(each.failed for each in reports))


def _wants(item: Any, name: str) -> bool:
    return any(mark.kwargs.get(name) for mark in item.iter_markers("skipif"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any], config: Any) -> None:
    """Keep the tests that are about these strategies, and say which they are."""
    kept = [each for each in items if hasattr(each, "function") and TOLD["only"] in each.nodeid and _is_about(each)]
    items[:] = [each for each in kept if TOLD["gpu"] or not _wants(each, "min_cuda_gpus")]


def _is_about(item: Any) -> bool:
    parameters = repr(item.callspec.params) if hasattr(item, "callspec") else ""
    return ABOUT.search(inspect.getsource(item.function) + parameters) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """Begin a test's notes; one that makes the strategy itself gets ours."""
    _made.clear()
    torch.manual_seed(0)  # data sets draw when they are made: alike in all ranks
    _on_cpu[0] = _wants(item, "min_cuda_gpus")
    if _mode[0] != "plain" and item.path.name == "test_model_parallel.py":
        item.module.ModelParallelStrategy = lambda **options: replaced(ModelParallelStrategy(**options), _mode[0])
    if item.path.name == "test_model_parallel.py":
        _made.append("ModelParallelStrategy")


@pytest.fixture
def tmp_path() -> Path:
    """Give all ranks one folder, as a started function's arguments do."""
    folder = _notes[0].parent / "tmp_path"
    folder.mkdir(exist_ok=True)
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
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    note = {"test": item.nodeid, "outcome": outcome, "rank": rank, "when": call.when, "made": sorted(set(_made))}
    if error is not None:
        last = error.traceback[-1]
        own = next((each for each in reversed(error.traceback) if Path(str(each.path)) == item.path), last)
        parts = "; ".join(repr(each) for each in getattr(error.value, "exceptions", ()))
        note["reason"] = f"{error.type.__name__}: {' '.join(f'{error.value} {parts}'.split())}"
        note["where"] = f"{Path(str(last.path)).name}:{last.lineno + 1}"
        note["statement"] = " ".join(str(own.statement).split())
    with _notes[0].open("a") as file:
        file.write(json.dumps(note) + "\n")
