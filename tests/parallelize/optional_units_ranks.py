"""What the ranks of test_optional_units run."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize import optional_units, shard_model, transformer_blocks
from lightning_sp.rewrite.hugging_face.models import own_class
from tests.flows.models.llava_images import model, with_image
from tests.flows.models.llava_images_and_text import collate
from tests.flows.tiny import Tuned, llama, rows
from tests.trainer.tiny import quiet_trainer


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


def manual() -> str:
    """Train with an image in one group's rows alone; return the refusal."""
    image, text = rows(number=2, length=24)
    samples = [with_image(image), {"input_ids": text["input_ids"], "labels": text["input_ids"]}]
    try:
        quiet_trainer(2, strategy=dict(data_parallel_size=2), max_steps=1).fit(
            Manual(model()),
            DataLoader(samples, batch_size=1, collate_fn=collate),  # type: ignore[arg-type]
        )
    except SequenceParallelError as error:
        return str(error)
    return ""
