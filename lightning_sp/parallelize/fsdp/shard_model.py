"""FSDP2 over every rank: `fully_shard` of the model, for sequence parallelism always brings ZeRO with it.

Blocks are one group each, then the models that the LightningModule holds, then the root, so that no parameter stays outside (it would never
be synchronised, and ranks would drift silently). Layers that are the LightningModule's own children belong to the root: a step may use their
weights directly, or change their outputs in place. So do modules that share a parameter with others. Gradients are averaged over the whole
mesh; `loss` undoes exactly that factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.gloo_collectives import use_all_pairs_collectives
from lightning_sp.parallelize.fsdp.model_parts import gather_for_parts
from lightning_sp.parallelize.fsdp.object_outputs import find_outputs_in_objects
from lightning_sp.parallelize.fsdp.optional_units import find_optional_units
from lightning_sp.parallelize.fsdp.parameter_dtypes import refuse_changed_dtypes, units_of_own_dtype
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules
from lightning_sp.parallelize.fsdp.unused_parameters import complete_gradients
from lightning_sp.parameter_names import user_name
from lightning_sp.quantized_weights import quantized_parameters

# The attribute of a module that an earlier Trainer has sharded.
_LAYOUT = "_lightning_sp_layout"
# Wrappers that do what the strategy does.
_REPLICAS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def check_unsharded(root: nn.Module) -> None:
    """Refuse a model that was sharded or replicated by hand: its mesh would not be the strategy's."""
    if parameter_layout(root) is not None:
        return
    found = [name or "the root" for name, each in root.named_modules() if isinstance(each, FSDPModule)]
    if found:
        raise SequenceParallelError(
            f"{len(found)} modules are already fully_shard'ed ({found[0]}, ...): the strategy shards over its own mesh; "
            "remove fully_shard from configure_model"
        )
    wrapped = [(n or "the root", each) for n, each in root.named_modules() if isinstance(each, _REPLICAS)]
    if wrapped:
        name, wrapper = wrapped[0]
        raise SequenceParallelError(
            f"{name} is a {type(wrapper).__name__}, which would average gradients a second time or split batches a second time: the strategy "
            "does both for the whole model; leave the wrapper out"
        )


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """How a model was laid over the ranks: what another Trainer in the same process must ask for too.

    Args:
        world_size: ranks.
        shard_size: of them, those over which parameters are split.
        compile: whether the strategy compiled the blocks.
    """

    world_size: int
    shard_size: int
    compile: bool


def parameter_layout(root: nn.Module) -> ParameterLayout | None:
    """Return how an earlier Trainer laid this model over the ranks, None where none has."""
    found = vars(root).get(_LAYOUT)
    return found if isinstance(found, ParameterLayout) and isinstance(root, FSDPModule) else None


def remember_layout(root: nn.Module, layout: ParameterLayout) -> None:
    """Let a later Trainer take the model as it is."""
    setattr(root, _LAYOUT, layout)


def check_layout(before: ParameterLayout, wanted: ParameterLayout) -> None:
    """Refuse to lay a sharded model over the ranks in another way. Equal on all ranks.

    Raises:
        SequenceParallelError: with the options that differ.
    """
    pairs = [(field.name, getattr(before, field.name), getattr(wanted, field.name)) for field in fields(before)]
    if differing := [f"{name}={now}, before {was}" for name, was, now in pairs if was != now]:
        raise SequenceParallelError(
            f"an earlier Trainer of this process has sharded this model by other options than this one asks for ({'; '.join(differing)}): "
            "give the same, or build the model anew and load its weights (trainer.strategy.whole_state_dict)"
        )


def shard_model(root: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Apply FSDP2 to the blocks, to the models among the root's children and to the root, in place; quantized weights stay whole."""
    children = [child for child in root.children() if not isinstance(child, (nn.ModuleList, nn.ModuleDict))]
    models = [child for child in children if any(True for _ in child.children()) and child not in blocks]
    units = [
        unit
        for unit in (*units_of_own_dtype(root), *blocks, *models)
        if any(True for _ in unit.parameters()) and not shares_parameters(root, unit)
    ]
    whole = set(quantized_parameters(root).values())
    for unit in units:
        fully_shard(unit, mesh=mesh, ignored_params=whole)
    fully_shard(root, mesh=mesh, ignored_params=whole)
    for model in set(models) & set(units):
        gather_for_parts(model, units)
    use_all_pairs_collectives(fsdp_modules(root), mesh)
    find_outputs_in_objects(fsdp_modules(root))
    refuse_changed_dtypes(root)
    complete_gradients(root, fsdp_modules(root))
    find_optional_units(root)
    for name in STEPS:
        # Lightning calls these and not forward, which alone would all-gather the root's parameters.
        if callable(getattr(root, name, None)):
            register_fsdp_forward_method(root, name)


def shares_parameters(root: nn.Module, unit: nn.Module) -> bool:
    """Return whether a parameter of `unit` is also reached another way: in FSDP2 each belongs to one group."""
    own = {parameter for each in unit.modules() for parameter in each.parameters(recurse=False)}
    elsewhere, found = [root], {root}
    while elsewhere:
        new = {child for child in elsewhere.pop().children() if child is not unit} - found
        found |= new
        elsewhere.extend(new)
    return any(parameter in own for each in found for parameter in each.parameters(recurse=False))


def run_with_whole_parameters(run: Callable[[], Any]) -> Any:
    """Run a step and return its output; name the cause when it uses a parameter that FSDP has not all-gathered.

    Raises:
        SequenceParallelError: it uses one. Torch's own error, if there is one, speaks of DTensors.
    """
    try:
        output = run()
    except SequenceParallelError:
        raise
    except Exception as error:
        # A compiler puts its own error around one that is raised while it traces.
        if isinstance(refusal := getattr(error, "inner_exception", None), SequenceParallelError):
            raise refusal from error
        if "DTensor" in str(error):
            raise _used_outside(f"{type(error).__name__}: {error}") from error
        raise
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, DTensor):
        raise _used_outside(f"the loss is a DTensor over {loss.device_mesh}")
    return output


def _used_outside(what: str) -> SequenceParallelError:
    return SequenceParallelError(
        f"a step uses a parameter outside of the forward of the module that holds it, where FSDP has not gathered it ({what}); do it in "
        "that module's forward, or for a penalty on the weights use the optimizer's weight_decay; layers that are direct children of the "
        "LightningModule may be used anywhere in a step"
    )


def reshard(root: nn.Module) -> None:
    """Free all-gathered parameters: FSDP2 leaves the root's whole after an evaluation forward."""
    for each in fsdp_modules(root):
        each.reshard()


@contextmanager
def without_gradient_sync(root: nn.Module) -> Iterator[None]:
    """Accumulate whole local gradients without communication; the last micro-batch of an optimizer step reduces them.

    Raises:
        SequenceParallelError: a parameter has a hook, which one device calls after each micro-batch.
    """
    for name, parameter in root.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise SequenceParallelError(
                f"{user_name(name)} has a post-accumulate hook: it would be called once per optimizer step here, and after each micro-batch "
                "on one device: use accumulate_grad_batches=1, or change gradients in on_before_optimizer_step"
            )
    modules = fsdp_modules(root)
    for each in modules:
        each.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for each in modules:
            each.set_requires_gradient_sync(True, recurse=False)


def make_fsdp_root(root: nn.Module) -> None:
    """Make `root` the FSDP root now: the first module that runs becomes it, and a hook of the user's may run a child alone."""
    root._get_fsdp_state()._lazy_init()  # type: ignore[operator]
