"""Makes `Trainer(strategy="sequence_parallel")` known without an import of ours.

    import torch ──> entry point "torch.backends" ──> register() ──> a finder that waits
    import lightning.pytorch.strategies ──> found by it ──> executed as ever ──> the name is registered
    Trainer(strategy="sequence_parallel") ──> create_strategy() ──> only now: import lightning_sp

Torch calls `register` at the end of `import torch`, in every program of an environment that holds this package, and
raises whatever it raises. So this is a top-level module that imports the standard library alone, and every step
swallows its own failures: what is broken in lightning_sp shows, with its own traceback, when the strategy is asked for.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` is torch's switch for all such entry points.

Does not own: what `import lightning_sp` registers (lightning_sp/registration.py).
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "sequence_parallel"
_STRATEGIES = "lightning.pytorch.strategies"
_STANDALONE_STRATEGIES = "pytorch_lightning.strategies"
_log = logging.getLogger(__name__)


def register() -> None:
    """Register the strategy where Lightning is loaded, and wait for it where it is not yet; harmless when repeated."""
    try:
        for name in _FACTORIES:
            if name in sys.modules:
                _register_into(sys.modules[name])
        # Compared by name: after a reload of this module an earlier finder is of another class.
        if not any(type(finder).__qualname__ == _StrategiesFinder.__qualname__ for finder in sys.meta_path):
            sys.meta_path.insert(0, _StrategiesFinder())
    except Exception:
        _log.debug("lightning_sp: the strategy name could not be registered", exc_info=True)


def create_strategy(**init_args: Any) -> Any:
    """Import lightning_sp and create the strategy: what the name stands for until `import lightning_sp` replaces it."""
    from lightning_sp.strategy import SequenceParallelStrategy  # noqa: PLC0415  (the point of this module)

    return SequenceParallelStrategy(**init_args)


def refuse_standalone(**_: Any) -> Any:
    """Refuse Lightning's second name, whose Trainer takes no strategy of `lightning.pytorch`.

    Raises:
        SequenceParallelError: always.
    """
    from lightning_sp.errors import SequenceParallelError  # noqa: PLC0415  (the point of this module)

    raise SequenceParallelError(
        f"strategy={NAME!r} was given to pytorch_lightning's Trainer. lightning_sp works with lightning.pytorch, whose "
        "classes are not those of pytorch_lightning: write `import lightning.pytorch as pl`."
    )


_FACTORIES: dict[str, Callable[..., Any]] = {_STRATEGIES: create_strategy, _STANDALONE_STRATEGIES: refuse_standalone}


class _StrategiesFinder(MetaPathFinder):
    """Leaves finding to the finders behind it, and has Lightning's strategies registered into once executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _FACTORIES:
            return None
        try:
            spec = self._find_behind(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _register_after_exec(spec.loader, fullname)
            return spec
        except Exception:  # the import goes on without us, and meets whatever another finder raised
            _log.debug("lightning_sp: %s could not be watched", fullname, exc_info=True)
            return None

    def _find_behind(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            if hasattr(finder, "find_spec") and (spec := finder.find_spec(fullname, path, target)) is not None:
                return spec
        return None


def _register_after_exec(loader: Loader, fullname: str) -> None:
    """Override `exec_module` on this one loader, which stays the object and the type that everyone else expects."""
    if "exec_module" not in vars(loader):
        loader.exec_module = functools.partial(_exec_and_register, loader, fullname)  # type: ignore[method-assign]


def _exec_and_register(loader: Loader, fullname: str, module: ModuleType) -> None:
    if module.__name__ != fullname:  # a loader that serves many modules, as zipimport's
        type(loader).exec_module(loader, module)
        return
    vars(loader).pop("exec_module", None)
    loader.exec_module(module)
    try:
        _register_into(module)
    except Exception:
        _log.debug("lightning_sp: %s could not be registered into", fullname, exc_info=True)


def _register_into(module: ModuleType) -> None:
    registry = getattr(module, "StrategyRegistry", None)  # absent while another thread is still executing the module
    if registry is not None and NAME not in registry:
        registry.register(
            NAME, _FACTORIES[module.__name__], description="sequences sharded over devices, exact or refused"
        )
