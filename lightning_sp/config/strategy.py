"""All options of the strategy: the attention's, the memory's and its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from lightning_sp.config.attention import AttentionOptions
from lightning_sp.config.checks import Size, check_count, check_name, check_seconds, check_size
from lightning_sp.config.memory import MemoryOptions, budget_percent
from lightning_sp.config.tensor_parallel import check_tensor_parallel
from lightning_sp.errors import SequenceParallelError, closest

BALANCES = ("auto", "zigzag", "documents")


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(MemoryOptions, AttentionOptions):
    """Validated options of the strategy; everything but the degrees' resolution against the world.

    Those of the attention are described in `AttentionOptions`, those of memory in `MemoryOptions`.

    Args:
        sequence_parallel_size: Ranks that share one sequence. "auto": world / data_parallel_size, the whole world by default.
        data_parallel_size: Groups of ranks that read different samples. "auto": world / sequence_parallel_size.
        ulysses_size: Part of sequence_parallel_size that exchanges heads. "auto": as far as the model's query heads allow;
            over several nodes, what sends the fewest bytes between them (`nodes.Placement.bytes_across_nodes`).
        ring_size: Part of sequence_parallel_size that passes keys and values on. "auto": what Ulysses leaves.
        tensor_parallel_size: Ranks that split the weights of each layer, and its heads, before Ulysses does. They have the same tokens.
        tensor_parallel_plan: Which layers are split, and how, as Hugging Face writes it: ``{"layers.*.mlp.up_proj": "colwise"}``. None: what
            the model says itself, in an attribute ``tp_plan``.
        compile: Compile each transformer block with torch.compile.
        preflight: Before the first step, compare loss and every gradient of a crop, whole against sharded; and what a step logs or predicts.
        preflight_tokens: Length of the preflight's crop, rounded up to what the degrees divide; "auto" chooses.
        global_view: Show whole sequences in a step, to model, loss and metrics: tensors have the shape that one device would see, and each
            rank holds its part (`global_view.table` has the rules). For code that looks along the sequence by itself. "auto": where a step
            is refused without, and the preflight agrees to it so.
        shard_batch: Shard the batches; False for loaders that shard by hand.
        sequence_dims: Extra batch entries that carry the sequence, and along which dim: ``{"pixel_mask": 1}``. Names that begin with
            ``decoder_`` are of a second sequence, with a length of its own, as are the labels then. An empty one says that a batch without a
            known name holds no sequence, and runs whole. A batch may lack one, where no entry of another name may be meant.
        labels_shifted: Whether the batch's ``labels`` already hold the target of their own position. None: known by name
            alone (``shift_labels`` and ``targets`` are; ``labels`` of a Hugging Face model are not, an encoder-decoder's are), else refused.
        packed_documents: Whether position_ids that do not rise by one begin a document, to which attention keeps. None: known for
            `SequenceShardingDataModule`, and for Hugging Face models that get no attention mask (their own convention), else refused.
        balance: Which tokens each rank of a ring holds. "zigzag": balanced for one document. "documents": for each batch's packed documents, so
            that all ranks compute about equally many (query, key) pairs. "auto": that where zigzag is more than 5% off and it should pay.
        save_distributed_checkpoint: Write each checkpoint as a DCP directory; False: as one consolidated file, by rank 0.
        asynchronous_checkpoints: Write what ModelCheckpoint saves while training goes on, from a copy in the host's memory, each rank its part
            of a DCP directory. "auto": where the copies fit in half of the memory that each node has left.
        exclude_frozen_parameters: Leave frozen parameters that building the model gives again, the base of a LoRA, out of checkpoints. Each is
            known by a digest; one that was ever changed is saved, and a load into another base is refused.
        timeout_s: Time limit of every collective from the first batch on, in seconds.
        start_timeout_s: Time limit before the first batch, in seconds: while rank 0 builds the model, reads its weights or a checkpoint,
            the others wait. A rank that does nothing at all, no thread or process of it, has timeout_s there too, also behind a run (on the
            host of a rank that waits for it). Of a process group that others made neither limit is changed.
        hang_s: After how long a rank that others wait for is named, with its stack, in seconds. "auto": 60, or half of timeout_s if that is
            less. Ranks that wait in different collectives end the run within seconds, unless a thread of the user's runs beside: it may help.
        preemption_limit_s: How long after SIGTERM a process may finish its step and save, in seconds: past it, it says where it is, and ends.
        preemption_exit_code: Exit code of a run that SIGTERM has ended. 143 is 128 + SIGTERM, as a shell says it.
    """

    sequence_parallel_size: Size = "auto"
    data_parallel_size: Size = "auto"
    ulysses_size: Size = "auto"
    ring_size: Size = "auto"
    tensor_parallel_size: int = 1
    tensor_parallel_plan: Mapping[str, str] | None = None
    compile: bool = False
    preflight: bool = True
    preflight_tokens: Size = "auto"
    global_view: bool | Literal["auto"] = "auto"
    shard_batch: bool = True
    sequence_dims: Mapping[str, int] | None = None
    labels_shifted: bool | None = None
    packed_documents: bool | None = None
    balance: str = "auto"
    save_distributed_checkpoint: bool = True
    asynchronous_checkpoints: bool | Literal["auto"] = "auto"
    exclude_frozen_parameters: bool = False
    timeout_s: float = 300.0
    start_timeout_s: float = 1800.0
    hang_s: float | Literal["auto"] = "auto"
    preemption_limit_s: float = 300.0
    preemption_exit_code: int = 143

    def __post_init__(self) -> None:
        AttentionOptions.__post_init__(self)
        MemoryOptions.__post_init__(self)
        for name in (
            "sequence_parallel_size",
            "data_parallel_size",
            "ulysses_size",
            "ring_size",
            "preflight_tokens",
        ):
            check_size(name, getattr(self, name))
        check_count("tensor_parallel_size", self.tensor_parallel_size)  # before others are held against it
        dims: Any = {} if self.sequence_dims is None else self.sequence_dims
        if not isinstance(dims, Mapping) or not all(isinstance(name, str) for name in dims):
            raise SequenceParallelError(
                f"sequence_dims={dims!r}: must be entries by name, with the number of a dim each"
            )
        for name, dim in dims.items():
            if isinstance(dim, bool) or not isinstance(dim, int):
                raise SequenceParallelError(f"sequence_dims[{name!r}]={dim!r}: must be the number of a dim")
        check_name("balance", self.balance, BALANCES)
        if self.balance == "documents" and not self.shard_batch:
            raise SequenceParallelError(
                "balance='documents' with shard_batch=False: batches that are sharded by hand have the zigzag layout; use balance='auto' or "
                "'zigzag', or let the strategy shard"
            )
        if self.compile and self.fixed_tile_tokens is not None:
            raise SequenceParallelError(
                f"mlp_tile_tokens={self.mlp_tile_tokens!r} with compile=True: a compiled block is one graph, in which each tile would be a copy "
                "of the MLP; use activation_checkpointing, or leave compile=False"
            )
        if budget_percent(self.checkpoint_policy) is not None and not self.compile:
            raise SequenceParallelError(
                f"activation_checkpointing={self.activation_checkpointing!r} without compile=True: what is within such a budget is decided in a "
                "block's graph, which only a compiled block has; set compile=True, or use 'every_2' or 'selective'"
            )
        if self.preflight_tokens != "auto" and not self.preflight:
            raise SequenceParallelError(
                f"preflight_tokens={self.preflight_tokens} with preflight=False: nothing is tried on a crop; leave one of the two out"
            )
        self._check_stage_inputs()
        self._check_global_view()
        check_tensor_parallel(self.tensor_parallel_size, self.tensor_parallel_plan, self._against_tensor_parallel())
        self._check_asynchronous()
        if self.compile and (self.fixed_offload != "none" or self.offload_folder is not None):
            folder = "" if self.offload_folder is None else f" and offload_folder={self.offload_folder!r}"
            raise SequenceParallelError(
                f"activation_offload={self.activation_offload!r}{folder} with compile=True: torch.compile decides in its own graph what is "
                "saved for the backward; use one of the two"
            )
        check_seconds("timeout_s", self.timeout_s)
        check_seconds("start_timeout_s", self.start_timeout_s)
        self._check_hang()
        self._check_preemption()
        sp, ulysses, ring = self.sequence_parallel_size, self.ulysses_size, self.ring_size
        if sp != "auto" and ulysses != "auto" and ring != "auto" and ulysses * ring != sp:
            raise SequenceParallelError(
                f"ulysses_size={ulysses} x ring_size={ring} = {ulysses * ring}, but sequence_parallel_size={sp}: "
                "their product must be sequence_parallel_size; leave one of the three 'auto'"
            )

    def _check_stage_inputs(self) -> None:
        if self.stage_inputs == "saved":
            return
        if self.ulysses_stages == 1:
            raise SequenceParallelError(
                "stage_inputs='recomputed' with ulysses_stages=1: one stage has all heads, so nothing would be saved; set ulysses_stages to a "
                "divisor of the model's key-value heads"
            )
        if self.ring_saves_kv:
            raise SequenceParallelError(
                "stage_inputs='recomputed' with ring_saves_kv=True: the one computes keys again for the backward, the other saves them for it; "
                "use one of the two"
            )
        if self.compile:
            raise SequenceParallelError(
                "stage_inputs='recomputed' with compile=True: a compiled block is one graph, which decides itself what is saved for the "
                "backward; use stage_inputs='saved', or leave compile=False"
            )

    def _check_global_view(self) -> None:
        given = self.global_view
        if given != "auto" and not isinstance(given, bool):
            raise SequenceParallelError(f"global_view={given!r}: must be True, False or 'auto'")
        if given is True:
            against = self._against_global_view()
            against.pop("compile=True", None)  # which compiles for it, where it is known before the model is laid out
            for name, why in against.items():
                raise SequenceParallelError(
                    f"{name} with global_view=True: {why}; leave it out, or use global_view=False"
                )

    def _against_tensor_parallel(self) -> dict[str, str]:
        """Return the options that split weights do not go with, and why."""
        others = {
            "global_view=True": (
                self.global_view is True,
                "its rules do not know layers of which each rank has a part",
            ),
            "compile=True": (self.compile, "a compiled block is one graph, in which ranks do not add up"),
            "stage_inputs='recomputed'": (self.recomputed_stages > 1, "it projects with whole weights"),
            "gather_dtype='auto'": (
                self.gather_dtype == "auto",
                "the preflight reads a rank's part of a weight to make it whole",
            ),
            f"fp8={self.fp8!r}": (bool(self.fp8), "a rank would scale by its part of a weight"),
            "cpu_offload=True": (self.cpu_offload, "parts of split layers in the host's memory were never tried"),
            "exclude_frozen_parameters=True": (
                self.exclude_frozen_parameters,
                "a digest is known of rows that a rank has whole",
            ),
        }
        return {name: why for name, (given, why) in others.items() if given}

    @property
    def tries_global_view(self) -> bool:
        """Whether a refused step is tried in the global view: where the preflight is its judge, and no other option stands against it."""
        # What is said of the labels is true in both views, and needed in one.
        against = self._against_global_view().keys() - {f"labels_shifted={self.labels_shifted}"}
        return self.global_view == "auto" and self.preflight and not against

    def _against_global_view(self) -> dict[str, str]:
        """Return the options that steps on whole sequences would ignore, and why."""
        split = self.tensor_parallel_size
        others = {
            f"tensor_parallel_size={split}": (split > 1, "its rules do not know layers of which each rank has a part"),
            "compile=True": (self.compile, "the blocks were compiled for steps that see a part"),
            "shard_batch=False": (not self.shard_batch, "a batch that is sharded by hand shows this rank's part"),
            f"labels_shifted={self.labels_shifted}": (
                self.labels_shifted is not None,
                "labels are as the loader gave them",
            ),
            "stage_inputs='recomputed'": (
                self.recomputed_stages > 1,
                "a model's own attention runs, and is not known by its structure",
            ),
            f"mlp_tile_tokens={self.mlp_tile_tokens!r}": (
                self.fixed_tile_tokens is not None,
                "an MLP sees whole sequences",
            ),
        }
        return {name: why for name, (given, why) in others.items() if given}

    @property
    def recomputed_stages(self) -> int:
        """Stages of each attention module that is projected again in the backward; 1 where none is."""
        return self.ulysses_stages if self.stage_inputs == "recomputed" else 1

    @property
    def attention(self) -> AttentionOptions:
        """The options of each attention call: one of a stage that is projected again has no stages of its own."""
        return replace(super().attention, ulysses_stages=self.ulysses_stages if self.recomputed_stages == 1 else 1)

    def _check_hang(self) -> None:
        if self.hang_s == "auto":
            return
        check_seconds("hang_s", self.hang_s)
        if self.hang_s >= self.timeout_s:
            raise SequenceParallelError(
                f"hang_s={self.hang_s:g} with timeout_s={self.timeout_s:g}: a run ends at timeout_s, and the warning of a rank that is late "
                "comes before; give less than timeout_s, or 'auto'"
            )

    def _check_asynchronous(self) -> None:
        given = self.asynchronous_checkpoints
        if given != "auto" and not isinstance(given, bool):
            raise SequenceParallelError(f"asynchronous_checkpoints={given!r}: must be True, False or 'auto'")
        if given is True and not self.save_distributed_checkpoint:
            raise SequenceParallelError(
                "asynchronous_checkpoints=True with save_distributed_checkpoint=False: one file needs the whole model in rank 0's memory, and "
                "is written at once; leave it 'auto', or write DCP directories"
            )

    def _check_preemption(self) -> None:
        check_seconds("preemption_limit_s", self.preemption_limit_s)
        code = self.preemption_exit_code
        if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code <= 255:
            raise SequenceParallelError(
                f"preemption_exit_code={code!r}: must be a whole number from 0 to 255, as a process ends with"
            )

    @property
    def warns_after_s(self) -> float:
        """`hang_s` in seconds."""
        return min(60.0, self.timeout_s / 2) if self.hang_s == "auto" else self.hang_s

    @property
    def memory(self) -> MemoryOptions:
        """The memory's options alone."""
        return MemoryOptions(**{field.name: getattr(self, field.name) for field in fields(MemoryOptions)})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all options."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def from_signature(cls, given: Mapping[str, Any], unknown: Mapping[str, Any]) -> StrategyConfig:
        """Build from what a function with all options in its signature was given, and from keywords that it does not know."""
        return cls.from_options({name: given[name] for name in cls.names()} | dict(unknown))

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> StrategyConfig:
        """Build from keywords, refusing an unknown one with the nearest known name."""
        known = cls.names()
        for name in options:
            if name not in known:
                raise SequenceParallelError(
                    f"unknown option {name!r} of the sequence_parallel strategy{closest(name, known)}; known: {', '.join(known)}"
                )
        return cls(**options)
