"""Batches of their users' own structures, trained and validated: what each rank runs in test_structures.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.lightning_ranks import fitted, trainer_of
from tests.trainer.tiny import Plain, TokenDataset, tiny_gpt


@dataclass
class Batch:
    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor
    source: str = "text"


@dataclass
class Own:
    """Of names that nobody knows."""

    tokens_in: Tensor
    places: Tensor
    tokens_out: Tensor
    rows: int


class Named(NamedTuple):
    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor


class WithTo:
    """As torchtext's batches."""

    def __init__(self, text: Tensor, places: Tensor, target: Tensor) -> None:
        self.text, self.places, self.target = text, places, target
        self.batch_size = len(text)

    def to(self, device: Any, **_: Any) -> WithTo:
        return WithTo(self.text.to(device), self.places.to(device), self.target.to(device))


class WithSlots:
    __slots__ = ("input_ids", "position_ids", "shift_labels")

    def __init__(self, *values: Tensor) -> None:
        self.input_ids, self.position_ids, self.shift_labels = values


def encoding(ids: Tensor, places: Tensor, labels: Tensor) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": ids, "position_ids": places, "shift_labels": labels})


# How a batch is made of ids, positions and targets, and how its step reads them.
STRUCTURES: dict[str, tuple[Any, Any]] = {
    "dataclass": (lambda *t: Batch(*t), lambda b: (b.input_ids, b.position_ids, b.shift_labels)),
    "own": (lambda *t: Own(*t, rows=len(t[0])), lambda b: (b.tokens_in, b.places, b.tokens_out)),
    "named": (Named, lambda b: (b.input_ids, b.position_ids, b.shift_labels)),
    "named, unpacked": (Named, lambda b: tuple(b)),
    "object": (WithTo, lambda b: (b.text, b.places, b.target)),
    "slots": (WithSlots, lambda b: (b.input_ids, b.position_ids, b.shift_labels)),
    "encoding": (encoding, lambda b: (b.input_ids, b["position_ids"], b.shift_labels)),
    "nested": (
        lambda i, p, t: {"inputs": {"input_ids": i, "position_ids": p}, "shift_labels": t, "meta": {"n": 3}},
        lambda b: (*b["inputs"].values(), b["shift_labels"]),
    ),
    "pair": (
        lambda i, p, t: ({"input_ids": i, "position_ids": p}, t),
        lambda b: (b[0]["input_ids"], b[0]["position_ids"], b[1]),
    ),
    "list": (lambda i, p, t: {"x": [i, p], "y": t}, lambda b: (*b["x"], b["y"])),
    "deep": (
        lambda i, p, t: {"a": Batch(i, p, t), "b": [("text", None)]},
        lambda b: (b["a"].input_ids, b["a"].position_ids, b["a"].shift_labels),
    ),
    "two of a name": (
        lambda i, p, t: {"first": {"ids": i, "at": p}, "second": {"ids": t}},
        lambda b: (b["first"]["ids"], b["first"]["at"], b["second"]["ids"]),
    ),
}  # fmt: skip


UNKNOWN = {"own", "object", "pair", "list", "two of a name"}


class Trained(Plain):
    def __init__(self, structure: str) -> None:
        super().__init__(tiny_gpt)
        self.kind, self.read = STRUCTURES[structure]
        self.kinds: set[str] = set()
        self.validated: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        self.kinds.add(type(batch).__name__)
        ids, places, targets = self.read(batch)
        return F.cross_entropy(self.model(ids, places).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(self.read(batch)[0]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, places, _ = self.read(batch)
        return self.model(ids, places)


def runs(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run(**case) for case in cases]


def run(
    structure: str,
    strategy: dict[str, Any] | None,
    world: int,
    micro: int = 4,
    length: int = 32,
    dims: dict[str, int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fit under plain Lightning (None) or ours; losses, weights and the batches' classes, or the refusal."""
    torch.manual_seed(3)
    module = Trained(structure)
    data = TokenDataset(8, length)
    rows = [{**data[i], "shift_labels": data.tokens[i, 1:]} for i in range(8)]
    names = ("input_ids", "position_ids", "shift_labels")
    collate = lambda samples: STRUCTURES[structure][0](*(torch.stack([row[n] for row in samples]) for n in names))  # noqa: E731
    if strategy is not None and dims:
        strategy = {**strategy, "sequence_dims": dims}
    trainer = trainer_of(strategy, world, **options)
    loader = DataLoader(rows, batch_size=micro, collate_fn=collate)  # type: ignore[arg-type]
    try:
        trainer.fit(module, loader, loader)
        # What nobody has named is known for a fit, which tries it.
        predicted = [torch.zeros(1)] if structure in UNKNOWN and not dims else trainer.predict(module, loader)
    except SequenceParallelError as error:
        return {"error": str(error)}
    return {**fitted(trainer, module), "kinds": module.kinds, "predicted": torch.cat(predicted)}
