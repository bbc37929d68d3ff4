"""What a step does while it runs whole: the dtypes it computes in, the random numbers it draws, and in which module."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from lightning_sp.preflight.comparison import plain_name

_DRAWS = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "binomial", "dropout", "dropout_"),
    *("rand_like", "randn_like", "randint_like", "uniform_", "normal_", "random_", "exponential_", "bernoulli_", "cauchy_", "geometric_"),
    *("log_normal_", "native_dropout", "alpha_dropout", "feature_dropout", "rrelu", "gumbel_softmax", "trunc_normal_"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Random numbers drawn: by which function, how many, and in which module; an empty name is training_step itself."""

    function: str
    shape: tuple[int, ...] | None
    module: str

    def describe(self) -> str:
        """Return it in words."""
        shape = "" if self.shape is None else f" of {self.shape}"
        return f"{self.function}{shape} in {self.module or 'training_step'}"


@dataclass(frozen=True)
class AttentionCall:
    """Tokens of a call of torch's attention: its queries and its keys, and the module that made it."""

    module: str
    queries: int
    keys: int


class ModuleStack:
    """The modules whose forwards are running, by name; a class because it is read while they do."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @property
    def innermost(self) -> str:
        """The name of the innermost, empty outside of all."""
        return self.names[-1] if self.names else ""


@contextmanager
def module_stack(root: nn.Module) -> Iterator[ModuleStack]:
    """Keep track of the modules of `root` whose forwards run."""
    names = {module: plain_name(name) for name, module in root.named_modules()}
    stack = ModuleStack()

    def enter(module: nn.Module, _: Any) -> None:
        if module in names:
            stack.names.append(names[module])

    def leave(module: nn.Module, *_: Any) -> None:
        if module in names and stack.names:
            stack.names.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


class Watch(TorchFunctionMode):
    """Collects the floating dtypes of what gradients flow through, a model's inner upcasts included, and what is drawn at random."""

    def __init__(self, module: nn.Module, stack: ModuleStack) -> None:
        super().__init__()
        self.dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
        self.draws: list[Draw] = []
        self._stack = stack
        self._streams = _python_streams()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for each in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(each, Tensor) and each.is_floating_point() and each.requires_grad:
                self.dtypes.add(each.dtype)
        name = getattr(function, "__name__", "")
        if name in _DRAWS:
            shape = tuple(output.shape) if isinstance(output, Tensor) else None
            self.draws.append(Draw(function=name, shape=shape, module=self._stack.innermost))
        return output

    def all_draws(self) -> list[Draw]:
        """Return what was drawn since the watch began, each once, of Python's and numpy's global streams too."""
        moved = zip(("random", "numpy.random"), self._streams, _python_streams(), strict=True)
        others = [Draw(function=name, shape=None, module="") for name, before, now in moved if before != now]
        return list(dict.fromkeys([*self.draws, *others]))


def _python_streams() -> tuple[str, str]:
    kind, keys, *rest = np.random.get_state()
    return str(hash(random.getstate())), f"{kind}{hash(np.asarray(keys).tobytes())}{rest}"
