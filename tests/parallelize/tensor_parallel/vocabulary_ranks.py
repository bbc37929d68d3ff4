"""Tables and heads whose words are split over ranks: what reads logits, what is no word, and what a rank holds of them."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.parallelize import transformer_blocks
from lightning_sp.parallelize.memory.model_bytes import model_bytes
from tests.instruments.live_storages import LiveStorages
from tests.parallelize.tensor_parallel.tensor_parallel_ranks import WORDS, HuggingFace, small_llama
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer


class Reading(Plain):
    """Reads logits in every way."""

    def __init__(self) -> None:
        super().__init__(partial(HuggingFace, "llama", vocab_size=WORDS))
        self.kept: list[Tensor] = []
        self.returned: list[Tensor] = []
        self.generated: list[Any] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.logits(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        return {"loss": loss, "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(outputs["logits"].detach().clone())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.logits(batch)
        right = (logits.argmax(-1) == batch["input_ids"]).double().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(batch["input_ids"]))
        self.log("entropy", -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(), sync_dist=True, batch_size=1)
        self.kept.append(logits.detach())
        prompt = batch["input_ids"][:, :5]
        made = self.model.inner.generate(input_ids=prompt, max_new_tokens=3, do_sample=False)
        self.generated.append(made.tolist())

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.logits(batch)


def read(world: int, strategy: dict[str, Any]) -> dict[str, Any]:
    """Fit, validate and predict; return everything that was read of logits."""
    torch.manual_seed(3)
    module = Reading()
    trainer = quiet_trainer(world, strategy=strategy, max_epochs=1)
    data = TokenDataset(4)
    trainer.fit(module, DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))
    predicted = trainer.predict(module, DataLoader(data, batch_size=2))
    return {
        "numbers": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "predicted": [each + 0.0 for each in predicted or []],
        "kept": [each + 0.0 for each in module.kept],
        "returned": module.returned,
        "generated": module.generated,
    }


class Wrong(TokenDataset):
    """A sample with a token or a target that is no word."""

    def __init__(self, which: str) -> None:
        super().__init__(2)
        self.which = which

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        sample["input_ids" if self.which == "token" else "shift_labels"][-1] = WORDS
        return sample


def wrong_words() -> dict[str, str]:
    """Return the error of a word that is none, by where it stands."""
    found = {}
    for which in ("token", "target"):
        module = Plain(partial(small_llama, vocab_size=WORDS, num_layers=1, hidden_dim=48))
        trainer = quiet_trainer(2, strategy={"tensor_parallel_size": 2, "preflight": False}, max_epochs=1)
        try:
            trainer.fit(module, DataLoader(Wrong(which), batch_size=2))
            found[which] = "none"
        except (IndexError, RuntimeError) as error:
            found[which] = "IndexError" if "index" in str(error) or "bounds" in str(error) else str(error)
    return found


class Measured(Plain):
    """Notes the largest tensor of a step, its backward and its update."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(partial(small_llama, **{"vocab_size": 4096, "num_layers": 1, "hidden_dim": 48, **sizes}))
        self.live: LiveStorages | None = None
        self.found: dict[str, int] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.live = LiveStorages([])
            self.live.__enter__()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Leave out that the others' gradients are made whole."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.live is not None:
            self.live.__exit__(None, None, None)
            self.found = {"largest": self.live.largest_bytes, "peak": self.live.peak_bytes}
            self.live = None


def largest_tensors(
    world: int, strategy: dict[str, Any], length: int = 32, precision: str = "64-true", **sizes: int
) -> dict[str, int]:
    """Return the bytes of this rank's part of a table, of the largest tensor in a step, of all at once, and what is predicted."""
    torch.manual_seed(3)
    module = Measured(**sizes)
    # Logits of all tokens are larger than a table, and those of a chunk smaller.
    strategy = {"loss_chunk_tokens": 8, **strategy}
    trainer = quiet_trainer(world, strategy=strategy, max_epochs=1, precision=precision)
    trainer.fit(module, DataLoader(TokenDataset(8, length=length), batch_size=4))
    table: Any = module.model.embedding.weight
    local = table.to_local() if hasattr(table, "to_local") else table
    predicted = model_bytes(module, transformer_blocks(module), (), torch.device("cpu"))
    return {**module.found, "table": local.nbytes, "gathered": predicted.gathered, "gradients": predicted.gradients}


class Apart(Plain):
    """Keeps logits on one rank alone, or has a number that is none in its words."""

    def __init__(self, keeps: bool, spoils: bool) -> None:
        super().__init__(partial(small_llama, vocab_size=WORDS, num_layers=1, hidden_dim=48))
        self.keeps, self.spoils = keeps, spoils
        self.kept: Tensor | None = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.spoils and batch_idx == 1:  # all ranks write: a write of one is refused
            self.model.head.weight.detach().to_local()[0, 0] *= float("nan") if dist.get_rank() == 1 else 1.0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        if self.keeps and dist.get_rank() == 0:
            self.kept = logits
        self.losses.append(float(loss.detach()))
        return loss


def apart(
    world: int, strategy: dict[str, Any], *, keeps: bool = False, spoils: bool = False, precision: str = "64-true"
) -> dict[str, Any]:
    """Fit such a model; return its losses, and what was warned of them."""
    torch.manual_seed(3)
    module = Apart(keeps, spoils)
    trainer = quiet_trainer(world, strategy={"preflight": False, **strategy}, max_epochs=1, precision=precision)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(TokenDataset(8), batch_size=4))
    said = [str(each.message) for each in caught if "loss is nan" in str(each.message)]
    return {"losses": module.losses, "said": said}
