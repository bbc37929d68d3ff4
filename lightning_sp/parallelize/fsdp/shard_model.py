"""FSDP2 over every rank: `fully_shard` of the model, for sequence parallelism always brings ZeRO with it.

Blocks are one group each, and so are large embeddings and heads; then the models that the LightningModule holds, then the root, so that no
parameter stays outside (it would never be synchronised, and ranks would drift silently). Layers that are the LightningModule's own children
belong to the root: a step may use their weights directly, or change their outputs in place. Modules that share a parameter with others are no
units. Gradients are averaged over the whole mesh; `loss` undoes exactly that factor.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from lightning_sp.config import MemoryOptions, StrategyConfig, resolve_shard_size
from lightning_sp.errors import SequenceParallelError, text_of, told_error
from lightning_sp.parallelize.fsdp.added_parameters import refuse_lost_parameters
from lightning_sp.parallelize.fsdp.dtensor.outside_weights import weights_read_outside, whole_outputs_of
from lightning_sp.parallelize.fsdp.gathers.gather_dtypes import GatherDtypes
from lightning_sp.parallelize.fsdp.gloo_collectives import use_all_pairs_collectives
from lightning_sp.parallelize.fsdp.parameter_dtypes import (
    know_dtypes_of_frozen,
    refuse_changed_dtypes,
    units_of_another_dtype,
    units_of_own_dtype,
)
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups, shares_parameters
from lightning_sp.parallelize.fsdp.parameters_without_dim import give_first_dim, show_without_dim
from lightning_sp.parallelize.fsdp.units.model_parts import gather_for_parts
from lightning_sp.parallelize.fsdp.units.object_outputs import find_outputs_in_objects
from lightning_sp.parallelize.fsdp.units.optional_units import find_optional_units, optional_units
from lightning_sp.parallelize.fsdp.units.unit_classes import stand_for, tell_identities
from lightning_sp.parallelize.fsdp.units.vocabulary_units import (
    heads_among,
    needs_no_weight_in_backward,
    own_outputs,
    stays_whole_until_backward,
    vocabulary_layers,
)
from lightning_sp.parallelize.fsdp.unused_parameters import complete_gradients, used_parameters
from lightning_sp.parameter_names import user_name
from lightning_sp.weights.quantized import quantized_parameters

# The attribute of a module that an earlier Trainer has sharded.
_LAYOUT = "_lightning_sp_layout"
# That of each unit of it.
_IS_OURS = "_lightning_sp_unit"
# Wrappers that do what the strategy does.
_REPLICAS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
# Options of memory that change nothing of a model.
_OF_EACH_RUN = (
    "loss_chunk_tokens",
    "delayed_init",
    "activation_checkpointing",
    "memory_budget_gib",
    "optimizer_in_backward",
)
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def check_unsharded(root: nn.Module) -> None:
    """Refuse a model that was sharded or replicated by hand: its mesh would not be the strategy's."""
    if parameter_layout(root) is not None:
        return
    found = [name or "the root" for name, each in root.named_modules() if isinstance(each, FSDPModule)]
    if found and any(_IS_OURS in vars(each) for each in root.modules()):
        raise SequenceParallelError(
            f"an earlier Trainer of this process has sharded {len(found)} modules of this model ({found[0]}, ...) within another one, and what "
            f"is sharded stays so: build {found[0]} anew, and load what was trained before the Trainer is asked: "
            f"state = strategy.whole_state_dict(old.{found[0]}), then new.{found[0]}.load_state_dict(state) on rank 0, which alone has it; "
            "the others get rank 0's weights"
        )
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
        memory: where parameters lie and what of the activations is kept, the shard size in ranks.
        compile: whether the strategy compiled the blocks.
        tensor_parallel_size: ranks that split the weights of layers.
        tensor_parallel_plan: which, if not the model's own plan says.
    """

    world_size: int
    memory: MemoryOptions
    compile: bool
    tensor_parallel_size: int = 1
    tensor_parallel_plan: Mapping[str, str] | None = None

    @classmethod
    def of(cls, config: StrategyConfig, world_size: int) -> ParameterLayout:
        """Return the layout that options ask for in a world."""
        shard_size = resolve_shard_size(config, world_size)
        return cls(
            world_size=world_size,
            memory=replace(config.memory, shard_size=shard_size),
            compile=config.compile,
            tensor_parallel_size=config.tensor_parallel_size,
            tensor_parallel_plan=config.tensor_parallel_plan,
        )

    def values(self) -> dict[str, Any]:
        """Return what another Trainer must ask for too, by the options' names."""
        memory = {name: value for name, value in asdict(self.memory).items() if name not in _OF_EACH_RUN}
        split = {name: getattr(self, name) for name in ("tensor_parallel_size", "tensor_parallel_plan")}
        return {"world_size": self.world_size, **memory, "compile": self.compile, **split}


def parameter_layout(root: nn.Module) -> ParameterLayout | None:
    """Return how an earlier Trainer laid this model over the ranks, None where none has."""
    found = vars(root).get(_LAYOUT)
    return found if isinstance(found, ParameterLayout) and isinstance(root, FSDPModule) else None


def remember_layout(root: nn.Module, layout: ParameterLayout) -> None:
    """Let a later Trainer take the model as it is, and say of parts of it who has sharded them."""
    setattr(root, _LAYOUT, layout)
    for each in fsdp_modules(root):
        setattr(each, _IS_OURS, True)


def check_layout(before: ParameterLayout, wanted: ParameterLayout) -> None:
    """Refuse to lay a sharded model over the ranks in another way. Equal on all ranks.

    Raises:
        SequenceParallelError: with the options that differ.
    """
    asked = wanted.values()
    pairs = [(name, was, asked[name]) for name, was in before.values().items()]
    if differing := [f"{name}={now}, before {was}" for name, was, now in pairs if was != now]:
        raise SequenceParallelError(
            f"an earlier Trainer of this process has sharded this model by other options than this one asks for ({'; '.join(differing)}): "
            "give the same, or build the model anew and load its weights (trainer.strategy.whole_state_dict)"
        )


def shard_model(
    root: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, options: MemoryOptions | None = None
) -> None:
    """Apply FSDP2 to the blocks, to the models among the root's children and to the root, in place; quantized weights stay whole."""
    options, single_numbers = options or MemoryOptions(), give_first_dim(root)
    children = [child for child in root.children() if not isinstance(child, (nn.ModuleList, nn.ModuleDict))]
    models = [child for child in children if any(True for _ in child.children()) and child not in blocks]
    of_own_dtype = units_of_own_dtype(root)
    found = {model: vocabulary_layers(root, model, blocks) for model in models}
    large = [layer for each in found.values() for layer in each if layer not in of_own_dtype]
    units = [
        unit
        for unit in dict.fromkeys((*of_own_dtype, *blocks, *large, *models))
        if any(True for _ in unit.parameters()) and not shares_parameters(root, unit)
    ]
    units = [*units_of_another_dtype(root, units), *units]
    heads = [head for model, each in found.items() for head in heads_among(model, each, blocks) if head in units]
    lookups = [layer for layer in large if layer in units and needs_no_weight_in_backward(layer)]
    given: dict[str, Any] = dict(mesh=mesh, ignored_params=set(quantized_parameters(root).values()))
    if options.gradient_dtype != "auto":
        given["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=getattr(torch, options.gradient_dtype))
    if options.cpu_offload:
        given["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for unit in (*units, root):
        stand_for(type(unit))
    for unit in units:
        own_outputs(unit)
        fully_shard(unit, reshard_after_forward=options.reshard_after_forward is not False, **given)
    fully_shard(root, **given)
    tell_identities(root)
    # Each trial and each checkpoint has Python forget what it has said. The user's own filters come first.
    warnings.filterwarnings("once", "FSDP2-wrapped module", UserWarning, append=True)
    show_without_dim(root, single_numbers)
    for model in set(models) & set(units):
        gather_for_parts(model, units)
    use_all_pairs_collectives(fsdp_modules(root), mesh)
    find_outputs_in_objects(fsdp_modules(root))
    refuse_changed_dtypes(root)
    know_dtypes_of_frozen(root)
    complete_gradients(root, fsdp_modules(root), [each for each in fsdp_modules(root) if each in set[Any](heads)])
    if options.gather_dtype == "auto":
        gather_as_autocast_casts(root)
    find_optional_units(root)
    for head in set(heads) - set(optional_units(root).units) if options.reshard_after_forward == "auto" else ():
        stays_whole_until_backward(head)
    for lookup in lookups:
        lookup.set_unshard_in_backward(False)  # type: ignore[operator]
    if options.prefetch_blocks != "auto":
        for model, layers in found.items():
            order = [each for each in model.modules() if each in units and (each in blocks or each in layers)]
            prefetch(order, options.prefetch_blocks)
    for name in STEPS:
        # Lightning calls these and not forward, which alone would all-gather the root's parameters.
        if callable(own := getattr(root, name, None)):
            register_fsdp_forward_method(root, name)
            # Lightning asks for the signature of what is wrapped once, and a user's decorator has wrapped it before.
            getattr(root, name).__func__.__wrapped__ = inspect.unwrap(own)


def gather_as_autocast_casts(root: nn.Module) -> None:
    """Gather weights in the dtype that autocast casts them to, once they are known to be read in no other way."""
    used = used_parameters(root)
    assert used is not None
    # The root's layers may be used anywhere in a step, and written to.
    used.gather_dtypes = GatherDtypes(fsdp_modules(root)[1:])


def prefetch(units: Sequence[Any], depth: int) -> None:
    """Let each sharded module gather the next ones when its forward begins, and the ones before it when its backward begins.

    Args:
        units: in the order of the forward.
        depth: how many.
    """
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[place + 1 : place + 1 + depth]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, place - depth) : place])))


def reduce_dtypes(root: nn.Module) -> set[torch.dtype]:
    """Return the dtypes in which a sharded module's gradients are summed, where they are not their own."""
    return {each.mp_policy.reduce_dtype for each in parameter_groups(fsdp_modules(root)) if each.mp_policy.reduce_dtype}


def run_with_whole_parameters(run: Callable[[], Any]) -> Any:
    """Run a step and return its output; name the cause when it uses a parameter that FSDP has not all-gathered.

    Raises:
        SequenceParallelError: it uses one. Torch's own error, if there is one, speaks of DTensors.
    """
    try:
        with weights_read_outside(), refuse_lost_parameters():
            output = whole_outputs_of(run())
    except SequenceParallelError:
        raise
    except Exception as error:
        # A compiler puts its own error around one that is raised while it traces.
        if isinstance(refusal := getattr(error, "inner_exception", None), SequenceParallelError):
            raise refusal from error
        if any(each in text_of(error) for each in _OF_TRANSFORMS) or (
            "DTensor" in text_of(error) and _is_of_transforms(error)
        ):
            raise SequenceParallelError(_WITHIN_TRANSFORMS.format(told_error(error))) from error
        if "DTensor" in text_of(error):
            raise _used_outside(told_error(error)) from error
        raise
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, DTensor):
        raise _used_outside(f"the loss is a DTensor over {loss.device_mesh}")
    return output


# What torch says where a function of FSDP2's, or of this package's, runs within a transform.
_OF_TRANSFORMS = ("to use an autograd.Function with functorch transforms",)
_WITHIN_TRANSFORMS = (
    "torch.func (grad, vmap, jvp, jacrev, functional_call) was handed weights that are sharded, or a module whose forward gathers them: its "
    "transforms see neither shards nor their collectives ({}). For each sample's gradient take one row's after the other, which is one "
    "device's: losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction='none').mean(1); "
    "[torch.autograd.grad(each, weights, retain_graph=True) for each in losses]"
)


def _is_of_transforms(error: BaseException) -> bool:
    """Return whether an error comes of a function within torch.func, by its traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [frame.f_globals.get("__name__", "") for frame in frames]
    return any(name.startswith("torch._functorch") for name in names)


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
def accumulating(root: nn.Module, *, whole: bool) -> Iterator[None]:
    """Run a micro-batch that others of its optimizer step follow.

    Args:
        root: sharded.
        whole: keep the gradients of whole weights on each rank, without communication; the step's last micro-batch reduces them. Else each
            micro-batch reduces its own, and a rank's shards add up.

    Raises:
        SequenceParallelError: a parameter has a hook, which sees gradients before micro-batches are weighed.
    """
    for name, parameter in root.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise SequenceParallelError(
                f"{user_name(name)} has a post-accumulate hook: it would see gradients before the micro-batches of its step are weighed by "
                "their tokens: use accumulate_grad_batches=1, or change gradients in on_before_optimizer_step"
            )
    if not whole:
        yield
        return
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
