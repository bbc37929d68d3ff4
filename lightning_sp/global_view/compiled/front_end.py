"""torch.compile of a function that is given tensors of the sequence: a block's forward, say.

    user's code --Dynamo--> functions of torch on whole shapes --rules of the table--> this rank's graph --backend--> code

Dynamo calls the rules once while it captures, for shapes. Where one cannot say what is made without numbers, the graph breaks, and that function
runs as without a compiler, on the tensors that the graph before it gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from lightning_sp.global_view.compiled.fallback import running_what_fails
from lightning_sp.global_view.compiled.local_graph import LocalGraph
from lightning_sp.global_view.compiled.saved import Backend, compiled_within
from lightning_sp.global_view.compiled.users_functions import leave_users_functions
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor, SequenceTensor

# Between two graphs rules run as they are: neither they nor what they call is compiled as a frame of its own.
set_code_exec_strategy(
    GlobalTensor.__torch_function__.__func__.__code__,  # type: ignore[attr-defined]
    FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP),
)


class FrontEnd:
    """Compiles functions by one backend. A class because blocks that are alike share their graphs, for which Dynamo asks for one object.

    Args:
        backend: makes code of this rank's graphs: the name of one of torch's, or a function.

    Attributes:
        notes: why graphs run function by function, one for each.
    """

    def __init__(self, backend: str | Backend) -> None:
        self._backend = backend
        self._running: list[Any] = []
        self.notes: list[str] = []
        self._recomputes = ""

    def capture(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs a graph that Dynamo captured."""
        if any(isinstance(each, GlobalTensor) for each in example_inputs):
            return LocalGraph(graph, self._backend, self)
        return compiled_within("", self._backend, graph, example_inputs)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, compiled; of tensors that are none of the sequence, as torch does it."""
        leave_users_functions()
        captured = torch.compile(function, backend=self.capture)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            sequences = [each for each in tree_leaves((args, kwargs)) if isinstance(each, SequenceTensor)]
            for each in sequences:
                _mark(each)
            self._running.append(function)
            GlobalTensor.captures += 1
            try:
                with running_what_fails(self.note):
                    return captured(*args, **kwargs)
            finally:
                GlobalTensor.captures -= 1
                self._running.pop()

        return run

    @contextmanager
    def recomputing(self, how: str) -> Iterator[None]:
        """Let graphs that run meanwhile compute again in their backward what they need: "full" all of it, "selective" not the attention,
        "matmuls" neither that nor products of matrices, "budget_<percent>" neither that nor what is dearest."""
        before, self._recomputes = self._recomputes, how
        try:
            yield
        finally:
            self._recomputes = before

    @property
    def recomputes(self) -> str:
        """What graphs compute again in their backward, as `recomputing` has it; empty for what the backend chooses."""
        return self._recomputes

    def note(self, reason: str) -> None:
        """Say why a graph runs function by function."""
        self.notes.append(reason)
        rank_zero_info(f"global_view: a compiled graph runs function by function: {reason}")

    def buffers(self) -> set[int]:
        """Return the buffers of the module that runs."""
        module = getattr(self._running[-1], "__self__", None)
        return {id(each) for each in module.buffers()} if isinstance(module, nn.Module) else set()


@cache
def front_end(backend: str | Backend) -> FrontEnd:
    """Return the one front end of a backend."""
    return FrontEnd(backend)


def _mark(tensor: SequenceTensor) -> None:
    """Let Dynamo take the lengths, whole and held, as symbols from the first call on."""
    torch._dynamo.maybe_mark_dynamic(tensor, tensor.placement.dim)
    torch._dynamo.maybe_mark_dynamic(tensor.local, tensor.placement.dim)
