"""What each rank runs in test_evaluation.py: a module whose validation shows numbers of several kinds; returns plain values."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_sp import SequenceParallelError
from lightning_sp.models import GPT, GPTConfig
from lightning_sp.reductions import batch_mean
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, quiet_trainer


class Evaluator:
    """A user's own object, that is no module."""

    def __init__(self) -> None:
        self.losses: list[float] = []


class Shown(Plain):
    """Shows what its kinds say, in validation and in test alike."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(lambda: GPT(GPTConfig(vocab_size=VOCAB, dim=32, num_layers=1, num_heads=4, max_positions=64)))
        self.kinds, self.hits, self.of_rows = kinds, list[torch.Tensor](), list[torch.Tensor]()
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro", ignore_index=-100)
        self.collection = MetricCollection({"mean": MeanMetric()}, prefix="of_")
        self.sum, self.own_sum = SumMetric(), SumMetric()
        self.evaluator, self.only, self.of_all_targets = Evaluator(), MeanMetric(), MeanMetric()
        self.register_buffer("counts", torch.zeros(VOCAB, dtype=torch.long), persistent=False)

    def setup(self, stage: str) -> None:
        self.own_sum.process_group = getattr(self.trainer.strategy, "data_parallel_group", None)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """An override, as users have them."""
        super().log(*args, **kwargs)

    def on_validation_epoch_end(self) -> None:
        if "gathered" in self.kinds:
            self.log("gathered", torch.cat(self.hits).mean())
        if "counted" in self.kinds:
            self.log("counted", self.counts[:30].sum() / self.counts.sum())

    def on_validation_batch_start(
        self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if "masked" in self.kinds:
            batch["shift_labels"] = batch["shift_labels"].clone()
            batch["shift_labels"][:, -3:] = -100
            batch["scale"] = 1.0

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        logits, targets = self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten()
        loss, hit = F.cross_entropy(logits, targets), (logits.argmax(-1) == targets).double()
        self.evaluator.losses.append(float(loss))
        if "gathered" in self.kinds:
            self.hits.append(hit)
        if "counted" in self.kinds:
            self.counts += torch.bincount(targets[targets >= 0], minlength=VOCAB)
        if "kept" in self.kinds:
            self.of_rows.append((batch["shift_labels"] < 30).double().mean(1))
        if "masked" in self.kinds:
            self.log("masked_loss", batch["scale"] * loss)
        if "right" in self.kinds:
            self.log("val_loss", loss)
            self.log_dict({"synced": hit.mean()}, sync_dist=True)
            self.log("reduced", batch_mean(hit.view_as(batch["shift_labels"])))
            self.accuracy.update(logits, targets)
            self.log("accuracy", self.accuracy)
            self.collection.update(loss)
            self.log_dict(self.collection)
            self.own_sum.update(loss)
            self.log("own_sum", self.own_sum)
            self.log("of_rank_0", loss, rank_zero_only=True)
        if "clock" in self.kinds:
            self.log("seconds", time.perf_counter())
        if "hidden" in self.kinds:
            # Under the name of a metric that is right, of rank 0 alone, and reduced by a function.
            self.accuracy.update(logits, targets)
            self.log("accuracy", (targets < 30).double().mean())
            self.log("alone", (targets < 30).double().mean(), rank_zero_only=True)
            self.log("greatest", loss, sync_dist=True, reduce_fx=torch.max)
        if "entropy" in self.kinds:
            self.log("entropy", -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean())
        if "draws" in self.kinds:  # a masked share of the tokens, as in masked language modelling
            chosen = torch.rand(batch["shift_labels"].shape) < 0.5
            losses = F.cross_entropy(logits, targets, reduction="none").view_as(chosen)
            self.log("of_chosen", (losses * chosen).sum() / chosen.sum())
        if "summed" in self.kinds:
            self.log("summed", loss, sync_dist=True, reduce_fx="sum")
        if "padded" in self.kinds:  # a metric that knows no ignored targets counts our padding
            self.of_all_targets.update((targets >= 0).double())
            self.log("of_all_targets", self.of_all_targets)
        if "weights" in self.kinds:
            self.log("by_rows", loss, batch_size=len(batch["input_ids"]))
            self.log("by_shape", loss, batch_size=batch["input_ids"].numel())
            self.log("by_all_tokens", loss, batch_size=int((targets > 30).sum()), sync_dist=True)
            self.log("by_tokens", loss, batch_size=int((targets > 30).sum()))
        if "metric" in self.kinds:
            self.sum.update(loss)
            self.log("total", self.sum)
        if "rank 0" in self.kinds and self.global_rank == 0:
            self.only.update(loss)
        if "fails" in self.kinds and len(targets) < 20:
            raise ValueError("this model wants 20 tokens")
        if "returned" in self.kinds:
            return {"norm": logits.norm()}
        return loss

    test_step = validation_step


def shown(world: int, run: str, kinds: tuple[str, ...], strategy: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Fit, validate or test, and return what was logged, what was said and how many steps ran.

    Args:
        world: number of ranks; one without a strategy of ours runs plainly.
        run: of the Trainer.
        kinds: of numbers.
        strategy: its options.
        options: of the Trainer.
    """
    torch.manual_seed(0)
    module = Shown(*kinds)
    micro = 2 // strategy.get("data_parallel_size", 1)
    loaders = [DataLoader(TokenDataset(8), batch_size=micro) for _ in range(2)]
    limits = dict(max_steps=2, limit_val_batches=2, limit_test_batches=2, val_check_interval=2)
    trainer = quiet_trainer(world, strategy=strategy, **{**limits, **options})
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            getattr(trainer, run)(module, *(loaders if run == "fit" else loaders[:1]))
        except SequenceParallelError as refusal:
            error = str(refusal)
    said = [str(each.message) for each in caught if str(each.message).startswith("preflight:")]
    ranks = [str(each.message) for each in caught if "the ranks of one sequence log" in str(each.message)]
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"logged": logged, "said": said, "ranks": ranks, "error": error, "num_steps": len(module.evaluator.losses)}


class Clock(Callback):
    """Logs in training what each rank measures for itself."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log("speed", 1.0 + torch.distributed.get_rank())
        assert "speed" in trainer.callback_metrics  # from now on, as where ModelCheckpoint looks


def timed() -> dict[str, Any]:
    """Fit by a ring of two with a clock."""
    return shown(2, "fit", ("right",), dict(ring_size=2), callbacks=[Clock()])


def monitored(name: str, kinds: tuple[str, ...] = ("right", "entropy")) -> dict[str, Any]:
    """Fit by a ring of two with an early stopping by a number."""
    return shown(2, "fit", kinds, dict(ring_size=2), callbacks=[EarlyStopping(name)])
