"""Activation checkpointing of transformer blocks, by a policy that may change from one step to the next.

    none        a block keeps its activations
    matmuls     it keeps its input, the attention operator's results and those of matrix products (`weights.matmuls`); norms, activations
                and all else are recomputed
    selective   it keeps its input, and the one attention operator with its saved tensors; the rest is recomputed in the backward
    every_<n>   selective in every n-th block, from the first on
    budget_50   compiled, it keeps its input, the attention operator's results, and half of what else it would: what is dearest for its bytes
    full        it keeps its input alone; the attention's kernels and messages run again

Two more are those of "auto" alone: "full_tiled" is full with MLPs in tiles, and "full_offloaded" so with inputs that leave.

Under "matmuls" a block that writes in place to a product's result, or runs other products in its recomputation, is refused. "auto" takes it
never: what it is worth is not known on a GPU.

All but "full" repeat neither a kernel of the attention nor a message. Under "full" the backward begins each block's messages in the order of
the blocks, the same on all ranks. Recomputation restores the random state of the forward, so dropout masks are the forward's.
Source: selective activation checkpointing, Korthikanti et al., arXiv:2205.05198; PyTorch's create_selective_checkpoint_contexts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_sp.attention.operator import attention_op
from lightning_sp.attention.staged import SAVED_OPERATORS
from lightning_sp.config import budget_percent
from lightning_sp.errors import SequenceParallelError, text_of
from lightning_sp.global_view.compiled.front_end import FrontEnd
from lightning_sp.global_view.compiled.saved import compiled_within, is_random, is_traced
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.parallelize.activation_offload import ActivationOffload
from lightning_sp.parallelize.compilation import without_compilation
from lightning_sp.parallelize.memory.activation_bytes import ActivationBytes
from lightning_sp.parallelize.memory.memory_prediction import CANDIDATES, OF_COMPILED, TILED, as_options, of_each_block
from lightning_sp.parallelize.memory.model_bytes import vocabulary_of
from lightning_sp.parallelize.recomputation.same_dtype import in_the_same_dtype
from lightning_sp.parallelize.recomputation.state_of_blocks import BlockState, once
from lightning_sp.parallelize.tiles import MlpTiles
from lightning_sp.weights.matmuls import KeptResults, is_kept

# The attribute of a model that holds its `BlockCheckpoints`.
_CHECKPOINTS = "_lightning_sp_checkpoints"
# What a block of Hugging Face's would write its keys to, and write them again when it is recomputed.
_CACHES = ("past_key_values", "past_key_value", "cache", "layer_past")

# Of a block's code that are compiled, torch's own limit being 8: one for each policy, with and without gradients, of one length and of several.
_MOST_GRAPHS = 64

# What torch says where it takes nothing that measures.
_DISPATCH = "dispatch mode"
_OF_MEASURING = ("saved tensor hooks", _DISPATCH)


class _Block:
    """How one block recomputes itself. A class because its policy changes while it runs; torch.compile guards its word, so blocks share a graph.

    Args:
        number: of the block.
        module: that it is.
    """

    def __init__(self, number: int, module: nn.Module) -> None:
        self.number, self.module, self.state = number, module, BlockState(module)
        # "none", "matmuls", "budget_<percent>", "selective", "full" or "measured".
        self.how = "none"


class BlockCheckpoints:
    """How each block of a model recomputes itself. A class because the policy changes while blocks read it.

    Args:
        blocks: of the model, in their order.
        policy: by its name; see the module's docstring. "auto": none, and what blocks leave for the backward is measured.
        measures: whether that can be measured; in compiled code it cannot.
        offload: takes the inputs of recomputed blocks away between forward and backward; None leaves them in memory.
        graphs: of blocks that are compiled in the global view, whose backward recomputes what a selective one does; None where none is.
        tiles: of the blocks' MLPs, for a policy to switch; None where they stay as they are.
        backend: of torch.compile, that compiles all blocks by `compile_block` or `graphs`; empty where one does otherwise, or none is compiled.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        policy: str,
        *,
        measures: bool = True,
        offload: ActivationOffload | None = None,
        graphs: FrontEnd | None = None,
        tiles: MlpTiles | None = None,
        backend: str = "",
    ) -> None:
        self._states = [_Block(number, without_compilation(block)) for number, block in enumerate(blocks)]
        self.activations = ActivationBytes(len(self._states), tiles)
        self._asked: set[int] = set()
        self._measures = measures
        self.offload, self.graphs, self.tiles, self._backend = offload, graphs, tiles, backend
        self.use(policy)

    def use(self, policy: str) -> None:
        """Follow a policy from the next forward on; blocks whose model asked for checkpoints are selective at least.

        Raises:
            SequenceParallelError: a budget of blocks that the strategy did not compile.
        """
        if budget_percent(policy) is not None and not self._backend:
            raise SequenceParallelError(
                f"activation_checkpointing={policy!r}: you have compiled blocks of this model yourself, and what their graphs save is decided "
                "there; leave that to compile=True, or use activation_checkpointing='every_2' or 'selective'"
            )
        self.policy = policy
        if policy == "auto":
            policy = "measured" if self._measures else "none"
        if self.tiles is not None:
            self.tiles.use(policy in TILED)
        if self.offload is not None and self.offload.waits:
            self.offload.is_on = policy == "full_offloaded"
        for state, how in zip(self._states, of_each_block(policy, len(self._states)), strict=True):
            keeps_more = how in ("none", "matmuls") or budget_percent(how) is not None
            state.how = "selective" if keeps_more and state.number in self._asked else how

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks, in their order."""
        return [each.module for each in self._states]

    @property
    def candidates(self) -> tuple[str, ...]:
        """The policies that "auto" chooses among, the cheapest in time first."""
        return OF_COMPILED if self._backend else CANDIDATES

    def compile_block(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a block's graph by the backend, for the policy in use: as `torch.compile` wants it of a function."""
        return compiled_within(self.policy, self._backend, graph, inputs)

    @property
    def of_block(self) -> list[str]:
        """How each block recomputes itself, in their order."""
        return [each.how for each in self._states]

    def can_tile(self, sees_whole: bool) -> list[bool]:
        """Return of each block whether a policy can let its MLPs run in tiles. In a step that sees whole sequences an MLP does, too."""
        return [False] * len(self._states) if self.tiles is None or sees_whole else self.tiles.can_tile()

    @property
    def horizon(self) -> int:
        """How many inputs of blocks are in memory at once under a policy that lets them leave; 0 where none can."""
        return self.offload.horizon if self.offload is not None and self.offload.waits else 0

    def as_options(self, policy: str) -> dict[str, str]:
        """Return the options by which a user asks for what a policy of "auto" does here."""
        tiles = self.tiles is not None and any(self.tiles.can_tile())
        return as_options(policy, tiles=tiles, tier=self.offload.tier if self.offload is not None else "none")

    @property
    def is_measured(self) -> bool:
        """Whether the next step is measured."""
        return "measured" in self.of_block

    def measure_no_more(self) -> None:
        """Take what shapes tell from now on."""
        self._measures = False
        self.use(self.policy)

    def describe(self, model: nn.Module) -> str:
        """Return how the blocks of a model recompute themselves, in a word; one by one where they differ. While they are measured: will."""
        parts = set(model.modules())
        kinds = {each.how for each in self._states if each.module in parts}
        kinds = {"selective" if how == "measured" else how for how in kinds}
        return " or ".join(sorted(kinds)) or "none, for it has no blocks"

    def ask(self, model: nn.Module) -> None:
        """Let the blocks of a model be selective at least: it has asked for checkpoints of its own."""
        parts = set(model.modules())
        self._asked |= {each.number for each in self._states if each.module in parts}
        self.use(self.policy)


def checkpoint_blocks(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    policy: str,
    *,
    measures: bool = True,
    offload: ActivationOffload | None = None,
    graphs: FrontEnd | None = None,
    tiles: MlpTiles | None = None,
    backend: str = "",
) -> BlockCheckpoints:
    """Make each block recompute itself as a policy says. The module tree and every name stay as they were. As `BlockCheckpoints`."""
    if backend:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    checkpoints = BlockCheckpoints(
        blocks, policy, measures=measures, offload=offload, graphs=graphs, tiles=tiles, backend=backend
    )
    for state in checkpoints._states:
        # On the instance: a wrapper module would put its own name into every parameter's.
        block = state.module
        signature = inspect.signature(block.forward)
        forward: Any = partial(_checkpointed, block.forward, checkpoints, state)
        forward.__signature__ = signature
        block.forward = forward
    setattr(module, _CHECKPOINTS, checkpoints)
    return checkpoints


def block_checkpoints(module: nn.Module) -> BlockCheckpoints:
    """Return what `checkpoint_blocks` made of a model."""
    found: BlockCheckpoints = vars(module)[_CHECKPOINTS]
    return found


def is_measured(module: nn.Module) -> bool:
    """Return whether the next step of a model is measured."""
    checkpoints = vars(module).get(_CHECKPOINTS)
    return isinstance(checkpoints, BlockCheckpoints) and checkpoints.is_measured


@contextmanager
def measured_step(module: nn.Module, tokens: int) -> Iterator[None]:
    """Measure what a step of some tokens of this rank leaves for its backward, if the policy waits for that."""
    if not is_measured(module):
        yield
        return
    checkpoints = block_checkpoints(module)
    with checkpoints.activations.measured(module, tokens, vocabulary_of(module, checkpoints.blocks)):
        yield


def refuses_measuring(module: nn.Module, error: RuntimeError) -> bool:
    """Return whether a measured step failed for being measured, and measure none from now on.

    `torch.func` takes no hooks of saved tensors, and Dynamo compiles nothing under a dispatch mode.
    """
    if not is_measured(module) or not any(words in text_of(error) for words in _OF_MEASURING):
        return False
    block_checkpoints(module).measure_no_more()
    if _DISPATCH in text_of(error):
        torch.compiler.reset()  # Dynamo has noted that it compiles that function never
    return True


def take_over_checkpointing(module: nn.Module) -> None:
    """Switch the models' own gradient checkpointing off, make their blocks selective at least, and say so.

    Their own would repeat the attention and its communication. A model may switch it on at any time before its first step.
    """
    for model in module.modules():  # outermost first, so that what lies within is off by then
        if not _checkpoints_itself(model):
            continue
        # The newer name first: where there are both, the older one warns.
        disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
        disable()  # type: ignore[operator]
        checkpoints = block_checkpoints(module)
        checkpoints.ask(model)
        rank_zero_info(
            f"sequence_parallel: the strategy recomputes the blocks of {type(model).__name__} in place of its own gradient checkpointing, which "
            f"would repeat the attention and its messages: activation_checkpointing={checkpoints.describe(model)}"
        )


def _checkpoints_itself(model: nn.Module) -> bool:
    return hasattr(model, "gradient_checkpointing_disable") and any(
        getattr(part, "gradient_checkpointing", False) is True for part in model.modules()
    )


def _checkpointed(
    forward: Callable[..., Any], checkpoints: BlockCheckpoints, block: _Block, *args: Any, **kwargs: Any
) -> Any:
    how = block.how
    if how == "none" or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if how == "measured":
        return checkpoints.activations.of_block(block.number, block.module, forward, args, kwargs)
    if checkpoints.graphs is not None:
        with checkpoints.graphs.recomputing(how):
            return forward(*args, **kwargs)
    kwargs = {name: None if name in _CACHES else value for name, value in kwargs.items()}
    forward = once(block.state, in_the_same_dtype(forward))
    recomputed = partial(checkpoint, use_reentrant=False)
    if how == "matmuls" and not torch.compiler.is_compiling():  # whose graphs write to nothing
        recomputed = partial(_with_results_as_they_were, block.module)
    elif (name := "budget" if how.startswith("budget") else how) in _CONTEXTS:
        recomputed = partial(recomputed, context_fn=_CONTEXTS[name])
    if (offload := checkpoints.offload) is None or not offload.is_on:
        return recomputed(forward, *args, **kwargs)
    return offload.run(recomputed, forward, args, kwargs)


def _saves(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operator in SAVED_OPERATORS or operator is attention_op
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _saves_matmuls(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator, args) else _saves(context, operator)


def _saves_matmuls_of_graph(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _saves_matmuls(context, operator, *args) if is_traced() else _saves(context, operator)


def _saves_within_budget(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if not is_traced():
        return _saves(context, operator)
    saved = _saves(context, operator) is CheckpointPolicy.MUST_SAVE or is_random(operator)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_SAVE


# Module-level partials: under torch.compile the context function must be one.
_CONTEXTS = {
    "selective": partial(create_selective_checkpoint_contexts, _saves),
    # A compiler that leaves a block half way has taken this one, and runs it as it is written: there it is selective.
    "matmuls": partial(create_selective_checkpoint_contexts, _saves_matmuls_of_graph),
    "budget": partial(create_selective_checkpoint_contexts, _saves_within_budget),
}


_OF_WRITTEN_BLOCKS = partial(create_selective_checkpoint_contexts, _saves_matmuls)


def _with_results_as_they_were(block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a block that keeps products' results, and refuse what writes to one: the backward would begin with what was written."""
    kept = KeptResults(type(block).__name__)

    def noted(*args: Any, **kwargs: Any) -> Any:
        with kept:
            return forward(*args, **kwargs)

    output = checkpoint(noted, *args, use_reentrant=False, context_fn=_OF_WRITTEN_BLOCKS, **kwargs)
    if kept.is_written:
        raise SequenceParallelError(
            f"activation_checkpointing='matmuls': {type(block).__name__} writes in place to what a linear layer or another matrix product gave, "
            "which that policy keeps for the backward; write `x = x + y` for `x += y`, or use activation_checkpointing='selective'"
        )
    # What is behind the block may write to it.
    output = tree_map_only(Tensor, lambda each: each.clone() if _own(each) in kept else each, output)
    kept.end()
    return output


def _own(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, SequenceTensor) else tensor


@contextmanager
def without_checkpoints(module: nn.Module) -> Iterator[None]:
    """Let the checkpointed blocks of a module keep their activations: a reference run is the user's own."""
    blocks = {each: f for each in module.modules() if isinstance(f := vars(each).get("forward"), partial)}
    checkpointed = {block: forward for block, forward in blocks.items() if forward.func is _checkpointed}
    for block, forward in checkpointed.items():
        block.forward = forward.args[0]
    try:
        yield
    finally:
        for block, forward in checkpointed.items():
            block.forward = forward
