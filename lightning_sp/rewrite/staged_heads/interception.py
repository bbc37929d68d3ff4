"""The attention modules of a model whose heads run in stages, and those that cannot, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_sp import comm
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.staged_heads.module import StagedAttention
from lightning_sp.rewrite.staged_heads.structure import AttentionHeads, attention_heads, candidates

_KNOWN = (
    "no module in it has linear layers q_proj, k_proj, v_proj and o_proj (or query, key, value and output) side by side"
)


class StagedHeads(AbstractContextManager[None]):
    """Runs the heads of a model's attention modules in stages, until it exits. The module tree and every name stay as they were.

    Args:
        context: with or without a step in progress.
        blocks: the model's transformer blocks.
        num_stages: of each attention module; 1 leaves all as they are.
        compiled: modules that are compiled as they are called.
    """

    def __init__(
        self, context: SequenceContext, blocks: Sequence[nn.Module], num_stages: int, compiled: Sequence[nn.Module]
    ) -> None:
        self._context, self._blocks, self._num_stages, self._compiled = context, blocks, num_stages, compiled
        self._undo = ExitStack()

    def __enter__(self) -> None:
        """Stage what can be staged, and say what cannot. Communicates: one all_gather of the reasons.

        Raises:
            SequenceParallelError: on all ranks, where nothing can be staged, or ranks find other modules.
        """
        if self._num_stages == 1:
            return
        found, reasons = self._find()
        of_ranks = comm.gather_objects((len(found), reasons))
        if any(each != of_ranks[0] for each in of_ranks):
            raise SequenceParallelError(
                f"stage_inputs='recomputed': ranks find different attention modules to run in stages: {of_ranks}; build the same model, "
                "with the same hooks, on all ranks, or use stage_inputs='saved'"
            )
        left = "; ".join(f"{number} {reason}" for reason, number in sorted(reasons.items()))
        if not found:
            raise SequenceParallelError(
                f"stage_inputs='recomputed' with ulysses_stages={self._num_stages}: none of the model's attention modules can run in stages: "
                f"{left or _KNOWN}; use stage_inputs='saved', or another number of stages"
            )
        rank_zero_info(
            f"sequence_parallel: {len(found)} attention modules project and exchange their heads in {self._num_stages} stages"
            + (f"; whole run {left}" if left else "")
        )
        for module, heads in found:
            module.forward = StagedAttention(self._context, module, heads)
            self._undo.callback(partial(delattr, module, "forward"))

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _find(self) -> tuple[list[tuple[nn.Module, AttentionHeads]], Counter[str]]:
        """Return the attention modules in stages, and how many others there are for each reason."""
        found: list[tuple[nn.Module, AttentionHeads]] = []
        reasons: Counter[str] = Counter()
        compiled = {part for module in self._compiled for part in module.modules()}
        for block in self._blocks:
            inside = list(candidates(block))
            for module in inside:
                heads = attention_heads(module, self._num_stages, self._context.run_mesh.layout.ulysses_size)
                if module in compiled:
                    heads = "it is compiled"
                elif "forward" in vars(module):
                    heads = "its forward is replaced on the module itself"
                if isinstance(heads, str):
                    reasons[f"{_name(module)} ({heads})"] += 1
                else:
                    found.append((module, heads))
            if not inside:
                reasons[f"{_name(block)} ({_KNOWN})"] += 1
        return found, reasons


def _name(module: nn.Module) -> str:
    """Return the name of a module's class as its file has it: FSDP2 makes it a subclass."""
    return next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule)).__name__
