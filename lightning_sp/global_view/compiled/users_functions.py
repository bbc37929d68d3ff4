"""`torch.autograd.Function`s of the user's in code that is captured: they run between two graphs, as without a compiler.

Dynamo traces the forward alone of one whose tensors need no gradient, and those of the sequence say so: their graph lies below them. The user's
backward would be lost, without a word, and the preflight runs without the compiler.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy

from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor
from lightning_sp.global_view.user_functions.autograd_functions import watching

_OWN = ("lightning_sp.", "torch.")


@cache
def leave_users_functions() -> None:
    """Let Dynamo break a graph at the user's functions while the project's front end captures."""
    # Not public; torch has no switch for it (2.13).
    from torch._dynamo.exc import unimplemented  # noqa: PLC0415
    from torch._dynamo.variables.misc import AutogradFunctionVariable  # noqa: PLC0415

    traced: Any = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, *args: Any) -> Any:
        if GlobalTensor.captures and not f"{self.fn_cls.__module__}.".startswith(_OWN):
            unimplemented(
                gb_type="global view: an autograd.Function",
                context=self.fn_cls.__qualname__,
                explanation="Dynamo would lose its backward.",
                hints=[],
            )
        return traced(self, *args)

    setattr(AutogradFunctionVariable, "call_apply", call_apply)  # noqa: B010, mypy knows of methods that they are none of an instance
    # Neither what stands in the place of `apply` nor the user's forward is compiled as a frame of its own.
    skipped = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(watching(call_apply).__code__, skipped)
