"""The backward of a tried step, and what it says where it cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError, text_of
from lightning_sp.parallelize import LearnsOutsideError, optional_units, used_parameters
from lightning_sp.preflight.comparison import plain_name

# What torch says where a backward reads a weight that FSDP has freed: of a sharded one, or of memory that is gone.
_OF_FREED_WEIGHTS = ("DTensor", "its data is not allocated")


def _first_line(error: Exception) -> str:
    return next(iter(text_of(error).splitlines()), type(error).__name__)


@contextmanager
def _forgotten_if_it_fails(module: nn.Module) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if (used := used_parameters(module)) is not None:
            used.forget()
        raise


def gradients_of(module: nn.Module, loss: Tensor | None) -> dict[str, Tensor | None]:
    """Run the backward of a step's loss, and return this rank's shard of every gradient; none is left behind.

    Raises:
        SequenceParallelError: it needs weights that FSDP has freed.
    """
    if loss is not None and loss.requires_grad:
        comm.meets_in_backward(loss)
        try:
            with _forgotten_if_it_fails(module):
                loss.backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, LearnsOutsideError) as error:
            if "storage of size 0" in text_of(error):
                raise SequenceParallelError(
                    f"preflight: the backward of training_step needs weights that FSDP has freed ({error}): what "
                    "torch.autograd.backward(..., create_graph=True) gave is differentiated once more, or the loss reads what a layer keeps in "
                    "an attribute, and not its output; have gradients from torch.autograd.grad(..., create_graph=True), or write the penalty "
                    "with finite differences, (critic(x + d) - critic(x)) / d.norm(); return what the loss reads from the layer's forward"
                ) from error
            is_freed = any(words in text_of(error) for words in _OF_FREED_WEIGHTS)
            if not is_freed and not isinstance(error, LearnsOutsideError):
                raise
            raise SequenceParallelError(
                f"preflight: the backward of training_step runs layers whose weights FSDP has freed ({_first_line(error)}): a function of the "
                "model computes them again by itself (reversible layers, as Reformer's); use layers without a backward of their own, with "
                "activation_checkpointing for their memory, or train the model without sequence parallelism"
            ) from error
    optional_units(module).release()
    gradients = {}
    for name, parameter in module.named_parameters():
        grad, parameter.grad = parameter.grad, None
        gradients[plain_name(name)] = grad.to_local() if isinstance(grad, DTensor) else grad
    return gradients
