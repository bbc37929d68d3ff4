"""Peak memory of each rank while a model is built, sharded and given its initial weights: drawn from a seed, or read from safetensors.

Run with ``OMP_NUM_THREADS=1 python -m benchmarks.memory.initial_weights``.
Measured from the begin of ``configure_model`` to the end of the strategy's
setup, in new processes for each row. Drawn beside read, with ``delayed_init`` and without.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.instruments.resident import Growth, peak_growth
from lightning_sp import SequenceParallelStrategy
from lightning_sp.testing import RankPool


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Llama in float32: its sizes, and where it is read, if it is."""

    folder: str | None = None
    blocks: int = 12
    dim: int = 640
    vocabulary: int = 8192

    def build(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

        if self.folder is not None:
            read: nn.Module = LlamaForCausalLM.from_pretrained(self.folder)
            return read
        sizes = LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.dim, intermediate_size=2816, num_hidden_layers=self.blocks,
            num_attention_heads=8, num_key_value_heads=8, use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip
        return LlamaForCausalLM(sizes)


class Built(pl.LightningModule):
    """Builds its model where Lightning asks for it, and measures until training would start."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.described, self.model = model, None
        self.growth = Growth()
        self._measured = ExitStack()

    def configure_model(self) -> None:
        if self.model is None:
            self.growth = self._measured.enter_context(peak_growth())
            self.model = self.described.build()

    def on_fit_start(self) -> None:
        self._measured.close()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("nothing is trained here")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def set_up(model: Model, delayed: bool, strategy: dict[str, Any], world: int) -> dict[str, int]:
    """Return the peak of this rank's memory, its shard, the whole model and its largest tensor, in bytes."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # What libraries make resident when they are first used is no memory of the model.
    Model(blocks=1, dim=64, vocabulary=8).build()
    torch.manual_seed(3)
    module = Built(model)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=SequenceParallelStrategy(delayed_init=delayed, **strategy), max_steps=1,
        limit_train_batches=0, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(1))))
    sizes = [parameter.nbytes for parameter in module.parameters()]
    shard = sum(parameter.to_local().nbytes for parameter in module.parameters())  # type: ignore[operator]
    return {"peak": module.growth.peak_bytes, "shard": shard, "whole": sum(sizes), "largest": max(sizes)}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Model().build().save_pretrained(folder, max_shard_size="100MB")  # type: ignore[operator]
        print(
            "| weights | delayed_init | peak of rank 0, MiB | largest of the others | shard | largest tensor | whole |"
        )
        print("|---|---|---|---|---|---|---|")
        for name, model in (("drawn", Model()), ("read", Model(folder=folder))):
            for delayed in (False, True):
                with RankPool(arguments.ranks, timeout_s=600) as pool:
                    first, *others = pool.run(set_up, model, delayed, {"preflight": False}, arguments.ranks)
                peaks = first["peak"], max(each["peak"] for each in others)
                numbers = (*peaks, first["shard"], first["largest"], first["whole"])
                print(f"| {name} | {delayed} | {' | '.join(f'{each / 2**20:.0f}' for each in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
