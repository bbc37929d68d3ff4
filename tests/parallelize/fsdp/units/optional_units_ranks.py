"""What the ranks of test_optional_units run."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize import optional_units, shard_model, transformer_blocks
from lightning_sp.rewrite.hugging_face.models import own_class
from tests.flows.models.images_in_text.llava_images import model, with_image
from tests.flows.models.images_in_text.llava_images_and_text import collate
from tests.flows.tiny import Tuned, llama, rows
from tests.trainer.tiny import _full, quiet_trainer


def units() -> tuple[list[str], list[str]]:
    """Return the classes of the optional units of LLaVA and of a Llama."""
    found = []
    for each in (Tuned(model()), Tuned(llama())):
        shard_model(each, transformer_blocks(each), init_device_mesh("cpu", (2,)))
        found.append([own_class(unit).__name__ for unit in optional_units(each).units])
    return found[0], found[1]


class Manual(Tuned):
    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))


def refusal(module: Any, samples: list[Any], world: int, strategy: dict[str, int], steps: int) -> str:
    """Train on one row for each data-parallel group; return the refusal."""
    loader = DataLoader(samples, batch_size=1, collate_fn=collate)  # type: ignore[arg-type]
    try:
        quiet_trainer(world, strategy=strategy, max_steps=steps).fit(module, loader)
    except SequenceParallelError as error:
        return str(error)
    return ""


def samples_of(*with_images: bool) -> list[Any]:
    """Return rows of text, some with an image in it; the same on every rank."""
    torch.manual_seed(6)
    return [
        with_image(row) if image else {"input_ids": row["input_ids"], "labels": row["input_ids"]}
        for row, image in zip(rows(number=len(with_images), length=24), with_images, strict=True)
    ]


def manual() -> str:
    """Images in one group alone, under manual optimization."""
    return refusal(Manual(model()), samples_of(True, False), 2, dict(data_parallel_size=2), 1)


SPLIT = dict(data_parallel_size=2, ring_size=2)


def unseen() -> str:
    """Images in one group alone, after a first batch without any, and no trial before them."""
    return refusal(Tuned(model()), samples_of(False, False, True, False), 4, {**SPLIT, "preflight": False}, 2)


def seen_later(world: int) -> dict[str, torch.Tensor]:
    """Return the weights behind two steps, of which the second has an image, in one group alone."""
    torch.manual_seed(6)
    module = Tuned(model())
    loader = DataLoader(samples_of(False, False, True, False), batch_size=1 if world > 1 else 2, collate_fn=collate)  # type: ignore[arg-type]
    quiet_trainer(world, strategy=SPLIT if world > 1 else {}, max_steps=2).fit(module, loader)
    return {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
