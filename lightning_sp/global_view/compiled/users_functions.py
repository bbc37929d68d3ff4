"""`torch.autograd.Function`s of the user's in code that is captured: refused.

Dynamo traces the forward alone of one whose tensors need no gradient, and those of the sequence say so: their graph lies below them. The user's
backward would be lost, without a word, and the preflight runs without the compiler.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.sequence_tensor import GlobalTensor

_OWN = ("lightning_sp.", "torch.")


@cache
def refuse_users_functions() -> None:
    """Let Dynamo refuse the user's functions while the project's front end captures."""
    # Not public; torch has no switch for it (2.13).
    from torch._dynamo.variables.misc import AutogradFunctionVariable  # noqa: PLC0415

    traced: Any = AutogradFunctionVariable.call_apply

    def call_apply(self: Any, *args: Any) -> Any:
        if GlobalTensor.captures and not f"{self.fn_cls.__module__}.".startswith(_OWN):
            raise SequenceParallelError(
                f"global_view: compile=True captures a block that calls {self.fn_cls.__qualname__}.apply, an autograd.Function of yours, whose "
                "backward would be lost: write it with functions of torch, or leave compile out"
            )
        return traced(self, *args)

    setattr(AutogradFunctionVariable, "call_apply", call_apply)  # noqa: B010, mypy knows of methods that they are none of an instance


def refusal_of(error: BaseException) -> SequenceParallelError | None:
    """Return the refusal that an error of Dynamo's was made of; None where it was made of none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, SequenceParallelError):
        cause = cause.__cause__ or cause.__context__
    return cause
