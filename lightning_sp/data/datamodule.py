"""`SequenceShardingDataModule`: text or token files -> the batches of each data-parallel rank, resumable to the sample.

The flow: source -> documents -> tokens (in memory, or on disk) -> split by document name -> windows -> order ->
batches. Each stage is a file of this package; this one joins them to Lightning. Batches are whole: the
sequence is sharded later, by the strategy. With a strategy that has `data_parallel_rank` and `data_parallel_size` all
ranks of a sequence-parallel group read the same samples; under others each process is a data-parallel rank.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DistributedSampler

from lightning_sp.data.loaders.collate import Batches
from lightning_sp.data.loaders.lazy_loader import LazyDataLoader
from lightning_sp.data.loop_state import align_loop_state, sampler_cursor
from lightning_sp.data.samplers.batch_split import BatchSplit
from lightning_sp.data.samplers.evaluation_sampler import EvaluationBatchSampler
from lightning_sp.data.samplers.training_sampler import GlobalBatchSampler, SequentialGlobalBatchSampler
from lightning_sp.errors import SequenceParallelError, check_whole_numbers
from lightning_sp.text.corpus import Corpus, split_by_name
from lightning_sp.text.source import Source
from lightning_sp.text.tokenizer import load_tokenizer
from lightning_sp.text.unigram import held_out_perplexity
from lightning_sp.text.windows import Packing, Remainder, Windows


class SequenceShardingDataModule(LightningDataModule):
    """Long documents as fixed-size windows, in an order that does not depend on the degrees.

    Validation, test and prediction read the held-out documents, each window once.

    Args:
        source: A path, glob pattern or list of these (text, .jsonl, .parquet), a token file's .idx, or "stdlib".
        sequence_length: Inputs of a window (each with its target).
        tokenizer: "bytes", a `tokenizers` .json file or a Hugging Face tokenizer's folder.
        packing: "document" (a window lies in one document) or "packed" (documents concatenated and cut).
        remainder: What is shorter than a window at the end is "drop"ped or "pad"ded; the count is logged.
        field: Field or column with the text, for .jsonl and .parquet.
        minimum_bytes: Shorter documents are left out; the count is logged.
        held_out: Documents for evaluation, chosen by a hash of their names: a fraction (float) or a number (int).
        micro_batch_size: Windows in a batch of one rank.
        global_batch_size: Windows in an optimizer step; must be micro_batch_size x accumulate_grad_batches x
            data-parallel size, which it is when None.
        seed: Of the order.
        shuffle: False keeps the order of the files.
        last_batch: "pad" completes the epoch's last global batch with windows whose targets are ignored, "drop" leaves
            it out. "auto" pads under a strategy that averages over valid tokens (it has `data_parallel_size`), where
            that is exact, and drops under others, where a batch without targets would give a loss of NaN.
        num_workers: Processes that read ahead.
        cache_dir: Folder that stores text tokenized between runs; None tokenizes in memory each time.
    """

    def __init__(
        self,
        source: str | list[str] = "stdlib",
        *,
        sequence_length: int = 8192,
        tokenizer: str = "bytes",
        packing: Packing = "document",
        remainder: Remainder = "drop",
        field: str = "text",
        minimum_bytes: int = 0,
        held_out: int | float = 0.05,
        micro_batch_size: int = 1,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        last_batch: Literal["auto", "pad", "drop"] = "auto",
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        counts = {"sequence_length": sequence_length, "micro_batch_size": micro_batch_size}
        check_whole_numbers(counts | ({} if global_batch_size is None else {"global_batch_size": global_batch_size}))
        check_whole_numbers({"minimum_bytes": minimum_bytes, "seed": seed, "num_workers": num_workers}, least=0)
        if isinstance(held_out, bool) or not isinstance(held_out, (int, float)):
            raise SequenceParallelError(f"held_out={held_out!r}: must be a fraction, or a number of documents")
        self.source = Source(source, tokenizer, field, minimum_bytes, cache_dir)
        self.sequence_length, self.packing, self.remainder, self.held_out = (
            sequence_length,
            packing,
            remainder,
            held_out,
        )
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.seed, self.shuffle, self.last_batch = seed, shuffle, last_batch
        self.num_workers = num_workers
        self.tokenizer = load_tokenizer(tokenizer)
        self._windows: tuple[Windows, Windows] | None = None
        self._data: dict[str, Any] = {}
        self._sampler: GlobalBatchSampler | None = None
        self._resumed: dict[str, Any] = {}

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""
        return self.tokenizer.vocab_size

    @property
    def train_windows(self) -> Windows:
        """The training windows, in the order of the files."""
        return self._built()[0]

    @property
    def held_out_windows(self) -> Windows:
        """The windows of the held-out documents, in the order of the files."""
        return self._built()[1]

    def unigram_perplexity(self) -> float:
        """Return the held-out perplexity of a model that knows the training tokens' frequencies alone (add-one)."""
        return held_out_perplexity(self.train_windows.corpus, self.held_out_windows.corpus, self.vocab_size)

    @property
    def split(self) -> BatchSplit:
        """How the global batch is cut in this run.

        Raises:
            SequenceParallelError: When it does not make `global_batch_size`, or changes during the run.
        """
        trainer = self.trainer
        for callback in getattr(trainer, "callbacks", []):
            if isinstance(callback, GradientAccumulationScheduler) and len(set(callback.scheduling.values())) > 1:
                raise SequenceParallelError(
                    f"GradientAccumulationScheduler({callback.scheduling}) changes the global batch during the run, by "
                    "which the order of samples is cut: give one accumulate_grad_batches to the Trainer"
                )
        accumulation = 1 if trainer is None else trainer.accumulate_grad_batches
        split = BatchSplit(self.micro_batch_size, accumulation, self._coordinate()[1])
        if self.global_batch_size is not None:
            split.require(self.global_batch_size, origin="global_batch_size")
        return split

    # Building

    def prepare_data(self) -> None:
        """Fill `cache_dir`, where one is given; one process of each node does."""
        if (written := self.source.fill_cache()) is not None:
            rank_zero_info(f"data: {written}")

    def setup(self, stage: str | None = None) -> None:
        """Open the source once, split it, and log what was found and what is left out.

        Raises:
            SequenceParallelError: When there is no training window.
        """
        if stage == "fit":
            self._resumed, self._sampler = {}, None
        if self._windows is not None:
            return
        corpus, description = self.source.open()
        train, held_out = (self._cut(view) for view in split_by_name(corpus, self.held_out))
        if not len(train):
            longest = int(train.corpus.sizes.max(initial=0))
            raise SequenceParallelError(
                f"no training window of {self.sequence_length} tokens: {train.describe()}, the longest document has "
                f"{longest} tokens and a window needs {self.sequence_length + 1}; use a shorter sequence_length, "
                "remainder='pad', packing='packed' or more text"
            )
        self._windows = train, held_out
        self._data = {
            "corpus": corpus.fingerprint(),
            "tokenizer": self.tokenizer.identity,
            "sequence_length": self.sequence_length,
            "packing": self.packing,
            "remainder": self.remainder,
            "held_out": self.held_out,
        }
        rank_zero_info(f"data: {description}\ndata: train {train.describe()}\ndata: held out {held_out.describe()}")

    def _cut(self, corpus: Corpus) -> Windows:
        return Windows(
            corpus,
            self.sequence_length,
            packing=self.packing,
            remainder=self.remainder,
            vocab_size=self.vocab_size,
            pad_id=self.tokenizer.eos_id or 0,
        )

    def _built(self) -> tuple[Windows, Windows]:
        if self._windows is None:
            raise SequenceParallelError(
                "the data are not built: call prepare_data() and setup() first (a Trainer does)"
            )
        return self._windows

    def _coordinate(self) -> tuple[int, int]:
        """Return (rank, size) on the data-parallel axis."""
        strategy: Any = getattr(self.trainer, "strategy", None)
        if hasattr(strategy, "data_parallel_size"):
            return strategy.data_parallel_rank, strategy.data_parallel_size
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    # Loaders

    def train_dataloader(self) -> LazyDataLoader:
        """Return this rank's micro-batches, from the resumed cursor on."""
        self._sampler = sampler = self._new_sampler()
        if self._resumed:
            sampler.load_state_dict(self._resumed)
        if sampler.num_samples % sampler.split.global_batch_size:
            size, left = sampler.split.global_batch_size, sampler.num_samples % sampler.split.global_batch_size
            what = "left out" if sampler.num_dropped else "trained as a shorter step"
            rank_zero_info(
                f"data: the last {left} of {sampler.num_samples} windows make no global batch of {size}: {what}"
            )
        return self._loader(self.train_windows, sampler)

    def val_dataloader(self) -> LazyDataLoader | list[Any]:
        """Return this rank's part of the held-out windows."""
        return self._evaluation_loader()

    def test_dataloader(self) -> LazyDataLoader | list[Any]:
        """Return this rank's part of the held-out windows."""
        return self._evaluation_loader()

    def predict_dataloader(self) -> LazyDataLoader | list[Any]:
        """Return this rank's part of the held-out windows."""
        return self._evaluation_loader()

    def _new_sampler(self) -> GlobalBatchSampler:
        exact = hasattr(getattr(self.trainer, "strategy", None), "data_parallel_size")
        last = self.last_batch if self.last_batch != "auto" else "pad" if exact else "drop"
        num_samples, dp_rank = len(self.train_windows), self._coordinate()[0]
        # overfit_batches asks for the same samples in every epoch.
        if self.shuffle and not getattr(self.trainer, "overfit_batches", 0):
            return GlobalBatchSampler(num_samples, self.split, dp_rank, seed=self.seed, last=last)
        return SequentialGlobalBatchSampler(num_samples, self.split, dp_rank, seed=self.seed, last=last)

    def _evaluation_loader(self) -> LazyDataLoader | list[Any]:
        if not len(self.held_out_windows):
            return []
        dp_rank, dp_size = self._coordinate()
        sampler = EvaluationBatchSampler(len(self.held_out_windows), self.micro_batch_size, dp_rank, dp_size)
        exact = hasattr(getattr(self.trainer, "strategy", None), "data_parallel_size")
        if sampler.num_filler_batches and not exact:
            rank_zero_warn(
                f"{sampler.num_batches} evaluation batches on {dp_size} data-parallel ranks leave "
                f"{sampler.num_filler_batches} ranks a batch without targets, of which a mean loss is NaN: weigh by valid "
                "tokens, or choose held_out or micro_batch_size so that the ranks get equally many"
            )
        return self._loader(self.held_out_windows, sampler)

    def _loader(self, windows: Windows, sampler: DistributedSampler[list[int]]) -> LazyDataLoader:
        # batch_size=None: the sampler yields whole batches, and is where Lightning looks for one that it may replace.
        dataset = Batches(windows)
        pin = torch.cuda.is_available()
        return LazyDataLoader(dataset, batch_size=None, sampler=sampler, num_workers=self.num_workers, pin_memory=pin)

    # Cursor

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: global samples consumed at an optimizer-step boundary, and what it depends on."""
        if self.trainer is None or self._sampler is None:
            return {}
        cursor = sampler_cursor(self._sampler, self.trainer.fit_loop)
        return cursor | {"accumulation": self._sampler.split.accumulation, "data": dict(self._data)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a stored cursor, at any degrees with the same global batch; evaluation has none.

        Raises:
            SequenceParallelError: When data, order or global batch size differ, with the numbers.
        """
        trainer = self.trainer
        if trainer is not None and trainer.state.fn != TrainerFn.FITTING:
            return
        differing = {k: (v, self._data.get(k)) for k, v in state_dict["data"].items() if self._data.get(k) != v}
        if differing:
            shown = "; ".join(f"{name} was {old!r}, is {new!r}" for name, (old, new) in differing.items())
            raise SequenceParallelError(
                f"the checkpoint's data cursor is of other data: {shown}. Give the same data and options, or start a "
                "new run from the weights alone"
            )
        sampler = self._sampler or self._new_sampler()
        sampler.load_state_dict(state_dict)
        self._resumed = dict(state_dict)
        if trainer is not None:
            align_loop_state(
                trainer._checkpoint_connector._loaded_checkpoint["loops"]["fit_loop"],
                trainer,
                epoch=sampler.epoch,
                steps=sampler.global_samples_skipped // sampler.split.global_batch_size,
                stored_accumulation=state_dict["accumulation"],
                loader_length=len(sampler),
            )
