"""Options that trade memory for time: where parameters lie, and what of the activations is kept."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from os import PathLike
from typing import Literal, cast

from lightning_sp.config.checks import Size, check_name, check_size
from lightning_sp.errors import SequenceParallelError, closest

GATHER_DTYPES = ("auto", "float32")
_HORIZON = 4
GRADIENT_DTYPES = ("auto", "float32", "bfloat16")
OFFLOAD_TIERS = ("auto", "none", "host", "disk")
STAGE_INPUTS = ("saved", "recomputed")

# How blocks recompute themselves, those that are named the cheapest in time first.
CHECKPOINT_POLICIES = ("auto", "none", "matmuls", "budget_<percent>", "every_<n>", "selective", "full")


def every_nth(policy: str) -> int | None:
    """Return n of the policy ``every_<n>``; None of another one."""
    found = re.fullmatch(r"every_([1-9]\d*)", policy)
    return int(found[1]) if found else None


def budget_percent(policy: str) -> int | None:
    """Return the percent of the policy ``budget_<percent>``, 1 to 99; None of another one."""
    found = re.fullmatch(r"budget_([1-9]\d?)", policy)
    return int(found[1]) if found else None


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What each rank holds of a model and its activations; of it `gradient_dtype` and `fp8` alone change a result, by rounding.

    Args:
        shard_size: Ranks over which FSDP2 splits parameters; the rest of the world replicates. "auto": the whole world.
        reshard_after_forward: Free a block's whole parameters after its forward, and gather them again for its backward (ZeRO-3); False: gather
            them once for both, and hold all of them between (ZeRO-2). "auto": free all but a head's, whose backward comes next.
        prefetch_blocks: Blocks whose parameters are gathered ahead of their use, forward and backward. "auto": what FSDP2 overlaps by itself.
        cpu_offload: Keep each rank's shards of the parameters, gradients and optimizer states in the host's memory, and step the optimizer
            there; for GPUs.
        gather_dtype: Dtype in which weights are gathered under autocast (precision="bf16-mixed"). "float32": all weights in their own.
            "auto": weights of linear layers and convolutions in bfloat16, at half the bytes, once all ranks have seen that autocast casts them
            to it and that nothing else reads them; the results are the same to the bit. Where anything is compiled: as "float32".
        gradient_dtype: Dtype in which gradients are summed over micro-batches and ranks; the optimizer sees them in their parameter's. "auto":
            their own.
        sync_each_batch: Reduce the gradients of each micro-batch over the ranks, whose shards add up over an optimizer step
            (accumulate_grad_batches). False: keep those of whole weights on each rank, and reduce them once. "auto": each, but for a
            `gradient_dtype` that you give, in which the sum is then kept.
        fp8: Multiply in the linear layers of transformer blocks with float8 numbers, by torchao (H100 and later). Forward and the gradient of
            the input, with a scale for each token, so that a part of a sequence is rounded as it is in the whole; the gradient of a weight in
            the layer's own dtype. "emulated" rounds alike on any device, slower than without. False: no layer but those that the model has
            itself.
        optimizer_in_backward: Step each unit of FSDP, a block say, when the backward has its gradients, and free them: gradients of about one
            unit are in memory, and not of all. The same to the bit. Not with gradient clipping, accumulation or manual optimization, which
            need all gradients at once.
        loss_chunk_tokens: Tokens whose logits exist at a time in the cross entropy of a language model's head. "auto": about 32 MiB of them in
            float32, 512 MiB on a GPU, 64 tokens at least. None: the logits of all tokens, in the copies that torch makes.
        activation_checkpointing: Which transformer blocks recompute their activations in the backward. "auto": as few as a step's predicted peak
            allows by `memory_budget_gib`; none while it fits. "none". "matmuls": all of them, but never their
            attention, its communication and products of matrices: norms, activations and such. "selective": these products too, but never the
            attention. "budget_<percent>": of compiled blocks (compile=True), whose partitioner keeps the attention, and of all else so many
            percent of the bytes, those that cost the most to compute again. "every_<n>": selective each n-th block, from the first on.
            "full": all of them with their
            attention, whose kernels and messages run twice. True is "selective", False is "none". Where "full" is not enough, "auto" goes on
            with MLPs in tiles and inputs that leave, as far as `mlp_tile_tokens` and `activation_offload` are at their defaults. With
            `activation_offload` "host" or "disk" it is "selective".
        memory_budget_gib: Memory of a rank that "auto" may fill, in GiB. "auto": nine tenths of the device's; on a CPU of the machine's, or of
            its cgroup's limit, divided by the ranks there. A budget that you give and nothing fits is refused; one by "auto" is warned of.
        mlp_tile_tokens: Tokens of a tile in which MLPs, experts and norms of blocks are computed, and recomputed in the backward: of what they
            save beside their input one tile's is alive. "auto": as many as the MLP's input has features. None: whole. "as_needed": whole, and as
            "auto" where `activation_checkpointing="auto"` finds no other room.
        stage_inputs: What the backward has of the q, k and v that a stage of `ulysses_stages` attends with. "saved": all of them, as they were
            exchanged. "recomputed": none; each stage is projected, rotated and exchanged again, so that of q, k and v one stage's are alive,
            forward and backward, with or without Ulysses. For attention modules that are known by their structure; the others run whole.
            The stages divide the key-value heads then.
        activation_offload: Where the inputs of recomputed blocks are between forward and backward. "host": in its pinned memory, of a GPU.
            "disk": in a file of each rank. "none": on the device. "auto": there, and where `activation_checkpointing="auto"` finds no other
            room, on the host of a GPU; of CPU ranks in files, if `offload_folder` is given.
        activation_loading_horizon: Of these inputs, those in memory at once: one that is used, the others on their way out or back.
        offload_folder: Where activation_offload="disk" writes its files, on a disk of each node. None: the folder of temporary
            files, and none for "auto".
        delayed_init: Give what `configure_model` draws or reads memory tensor by tensor, when it is sharded. False: rank 0 builds the whole
            model in its memory, and each rank reads the whole of a pretrained one.

    Raises:
        SequenceParallelError: a value that the option does not take.
    """

    shard_size: Size = "auto"
    reshard_after_forward: bool | Literal["auto"] = "auto"
    prefetch_blocks: Size = "auto"
    cpu_offload: bool = False
    gather_dtype: str = "float32"
    gradient_dtype: str = "auto"
    sync_each_batch: bool | Literal["auto"] = "auto"
    fp8: bool | Literal["emulated"] = False
    optimizer_in_backward: bool = False
    loss_chunk_tokens: Size | None = "auto"
    activation_checkpointing: bool | str = "auto"
    memory_budget_gib: float | Literal["auto"] = "auto"
    mlp_tile_tokens: int | Literal["auto", "as_needed"] | None = "as_needed"
    stage_inputs: str = "saved"
    activation_offload: str = "auto"
    activation_loading_horizon: int = _HORIZON
    offload_folder: str | None = None
    delayed_init: bool = True

    def __post_init__(self) -> None:
        check_size("shard_size", self.shard_size)
        check_size("prefetch_blocks", self.prefetch_blocks)
        for name, given in (("loss_chunk_tokens", self.loss_chunk_tokens), ("mlp_tile_tokens", self.fixed_tile_tokens)):
            if given is not None:
                check_size(name, given)
        check_name("gather_dtype", self.gather_dtype, GATHER_DTYPES)
        check_name("gradient_dtype", self.gradient_dtype, GRADIENT_DTYPES)
        check_name("activation_offload", self.activation_offload, OFFLOAD_TIERS)
        check_name("stage_inputs", self.stage_inputs, STAGE_INPUTS)
        if self.reshard_after_forward != "auto" and not isinstance(self.reshard_after_forward, bool):
            raise SequenceParallelError(
                f"reshard_after_forward={self.reshard_after_forward!r}: must be True, False or 'auto'"
            )
        if self.sync_each_batch != "auto" and not isinstance(self.sync_each_batch, bool):
            raise SequenceParallelError(f"sync_each_batch={self.sync_each_batch!r}: must be True, False or 'auto'")
        if self.fp8 != "emulated" and not isinstance(self.fp8, bool):
            raise SequenceParallelError(
                f"fp8={self.fp8!r}: must be True, False or 'emulated'; the recipe is torchao's rowwise_with_gw_hp, the one whose scales do "
                "not look along the sequence, as those of tensorwise, rowwise and MX do"
            )
        self._check_optimizer_in_backward()
        _check_policy(self.activation_checkpointing)
        _check_budget(self.memory_budget_gib)
        if self.memory_budget_gib != "auto" and self.checkpoint_policy != "auto":
            raise SequenceParallelError(
                f"memory_budget_gib={self.memory_budget_gib} with activation_checkpointing={self.activation_checkpointing!r}: a budget is for "
                "activation_checkpointing='auto', which chooses by it; leave one of the two out"
            )
        self._check_offload()

    def _check_optimizer_in_backward(self) -> None:
        if not isinstance(self.optimizer_in_backward, bool):
            raise SequenceParallelError(f"optimizer_in_backward={self.optimizer_in_backward!r}: must be True or False")
        if self.optimizer_in_backward and self.cpu_offload:
            raise SequenceParallelError(
                "optimizer_in_backward=True with cpu_offload=True: gradients leave the device as they come, and the host that steps them would "
                "hold up the backward; use one of the two"
            )

    @property
    def accumulates_whole(self) -> bool:
        """Whether micro-batches before an optimizer step's last leave the gradients of whole weights on each rank."""
        return self.gradient_dtype != "auto" if self.sync_each_batch == "auto" else not self.sync_each_batch

    @property
    def checkpoint_policy(self) -> str:
        """The policy of `activation_checkpointing` by its name."""
        given = self.activation_checkpointing
        if given == "auto" and self.fixed_offload != "none":
            return "selective"  # the inputs of recomputed blocks are what leaves
        return given if isinstance(given, str) else "selective" if given else "none"

    @property
    def fixed_tile_tokens(self) -> Size | None:
        """`mlp_tile_tokens` as far as it holds in every step: None where tiles wait for "auto"."""
        return None if self.mlp_tile_tokens == "as_needed" else self.mlp_tile_tokens

    @property
    def fixed_offload(self) -> str:
        """`activation_offload` as far as it holds in every step: "none" where it waits for "auto"."""
        return "none" if self.activation_offload == "auto" else self.activation_offload

    def _check_offload(self) -> None:
        horizon, tier = self.activation_loading_horizon, self.fixed_offload
        if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
            raise SequenceParallelError(f"activation_loading_horizon={horizon!r}: must be a positive integer")
        if tier != "none" and self.checkpoint_policy == "none":
            raise SequenceParallelError(
                f"activation_offload={tier!r} with activation_checkpointing={self.activation_checkpointing!r}: only the inputs of blocks "
                "that are recomputed are offloaded; set activation_checkpointing='selective'"
            )
        waits = self.activation_offload == self.activation_checkpointing == "auto"
        if horizon != _HORIZON and tier == "none" and not waits:
            raise SequenceParallelError(
                f"activation_loading_horizon={horizon} with activation_offload={self.activation_offload!r} and activation_checkpointing="
                f"{self.activation_checkpointing!r}: no input of a block leaves; set activation_offload='host' (GPUs) or 'disk' (CPUs), or "
                "leave it out"
            )
        if self.offload_folder is not None and not isinstance(self.offload_folder, (str, PathLike)):
            raise SequenceParallelError(
                f"offload_folder={self.offload_folder!r}: must be the path of a folder, or None"
            )
        if self.offload_folder is not None and tier != "disk" and not waits:
            raise SequenceParallelError(
                f"offload_folder={self.offload_folder!r} with activation_offload={self.activation_offload!r} and "
                f"activation_checkpointing={self.activation_checkpointing!r}: only activation_offload='disk' writes files there; set "
                "activation_offload='disk', or leave it out"
            )


def check_memory_device(options: MemoryOptions, device_type: str) -> None:
    """Refuse options that need another device than the ranks have. Equal on all ranks.

    Raises:
        SequenceParallelError: with the first such option.
    """
    if device_type == "cpu" and options.prefetch_blocks != "auto":
        raise SequenceParallelError(
            f"prefetch_blocks={options.prefetch_blocks} on CPU ranks: a gather over gloo has ended before its call returns, so one ahead of its "
            "use hides nothing and holds another block's parameters; leave it 'auto'"
        )
    if device_type == "cpu" and options.cpu_offload:
        raise SequenceParallelError(
            "cpu_offload=True on CPU ranks: their shards are in the host's memory already, so nothing would be saved; leave it out"
        )
    if device_type != "cpu" and options.offload_folder is not None and options.activation_offload == "auto":
        raise SequenceParallelError(
            f"offload_folder={options.offload_folder!r} on {device_type} ranks: inputs of blocks go to the host's memory there, and to no file; "
            "leave it out"
        )
    if device_type == "cpu" and options.activation_offload == "host":
        raise SequenceParallelError(
            "activation_offload='host' on CPU ranks: what they compute is in the host's memory already, so nothing would be saved; use "
            "activation_offload='disk'"
        )
    if device_type != "cpu" and options.activation_offload == "disk":
        raise SequenceParallelError(
            f"activation_offload='disk' on {device_type} ranks: the files are written from the host's memory, and this option does not copy "
            "there; use activation_offload='host'"
        )


def _check_budget(given: object) -> None:
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if given != "auto" and not (is_number and 0 < cast(float, given) < math.inf):
        raise SequenceParallelError(f"memory_budget_gib={given!r}: must be positive, in GiB for each rank, or 'auto'")


def _is_policy(name: str) -> bool:
    by_number = every_nth(name) is not None or budget_percent(name) is not None
    return by_number or (name in CHECKPOINT_POLICIES and name.isalpha())


def _check_policy(given: object) -> None:
    if isinstance(given, bool) or (isinstance(given, str) and _is_policy(given)):
        return
    near = closest(given, (*CHECKPOINT_POLICIES, "every_2", "budget_50")) if isinstance(given, str) else ""
    raise SequenceParallelError(
        f"activation_checkpointing={given!r}: must be one of {', '.join(CHECKPOINT_POLICIES)} with n a positive integer and percent "
        f"from 1 to 99, or True (selective) or False (none){near}"
    )
