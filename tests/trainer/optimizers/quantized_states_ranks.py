"""What each rank runs in test_quantized_states.py; returns plain values."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader

from lightning_sp.models import Llama, LlamaConfig
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, _full, quiet_trainer

# Rows of half a block, of a block and more; of the last two a half is not quantized: too few numbers, and no whole number of blocks.
SHAPES = ((128, 128), (128, 256), (64, 512), (62, 128), (66, 128))


def _made(kind: str, parameters: Any) -> torch.optim.Optimizer:
    import torchao.optim

    made: torch.optim.Optimizer = getattr(torchao.optim, kind)(parameters, lr=0.01)
    return made


def steps(kind: str) -> list[tuple[float, bool]]:
    """Step weights that are whole and that are sharded by the same gradients.

    Returns:
        Of each weight how far the sharded one is from the whole one, of the largest step, and whether some states differ.
    """
    # A group of its own: what other tests' failures have left in the world's would be taken for this one's.
    shape = (1, torch.distributed.get_world_size())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("alone", "shard"))["shard"]
    generator = torch.Generator().manual_seed(5)
    begin = [torch.randn(each, generator=generator) for each in SHAPES]
    wholes = [nn.Parameter(each.clone()) for each in begin]
    shards = [nn.Parameter(distribute_tensor(each.clone(), mesh, [Shard(0)])) for each in begin]
    of_wholes, of_shards = _made(kind, wholes), _made(kind, shards)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(4):
            for whole, shard in zip(wholes, shards, strict=True):
                whole.grad = torch.randn(whole.shape, generator=generator)
                shard.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
            of_wholes.step()
            of_shards.step()
    found = []
    for whole, shard, first in zip(wholes, shards, begin, strict=True):
        apart = (_full(shard.detach()) - whole).abs().max() / (whole - first).abs().max()
        states = [
            (value, of_shards.state[shard][name]) for name, value in of_wholes.state[whole].items() if name != "step"
        ]
        found.append((float(apart), any(not torch.equal(_numbers(a), _numbers(b)) for a, b in states)))
    return found


def _numbers(state: Any) -> Tensor:
    if isinstance(state, DTensor):
        local: Any = state.to_local()
        own = local.dequantize() if hasattr(local, "dequantize") and hasattr(local, "codes") else local
        whole: Tensor = DTensor.from_local(
            own, state.device_mesh, state.placements, shape=state.shape, stride=state.stride()
        ).full_tensor()
        return whole
    return state.dequantize() if hasattr(state, "codes") else state  # type: ignore[no-any-return]


class Module(Plain):
    """Trains a Llama whose matrices are large enough."""

    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step

    def __init__(self, kind: str) -> None:
        sizes = dict(vocab_size=VOCAB, dim=128, num_layers=1, num_heads=4, num_kv_heads=4, hidden_dim=256)
        super().__init__(partial(_llama, **sizes))
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = _made(self.kind, self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _llama(**sizes: int) -> nn.Module:
    return Llama(LlamaConfig(**sizes))


def fit(
    world: int, kind: str, strategy: dict[str, Any], max_steps: int = 3, save: str = "", resume: str = ""
) -> dict[str, Any]:
    """Fit in float32; return losses, weights, and the bytes of the states of quantized weights with their numbers."""
    torch.manual_seed(3)
    module = Module(kind)
    trainer = quiet_trainer(world, strategy=dict(preflight=False, **strategy), max_steps=max_steps, precision="32-true")
    with torch.compiler.set_stance("force_eager"):
        trainer.fit(module, DataLoader(TokenDataset(12, 32), batch_size=2), ckpt_path=resume or None)
    if save:
        trainer.save_checkpoint(save)
    local = [
        each.to_local() if isinstance(each, DTensor) else each
        for values in trainer.optimizers[0].state.values()
        for each in (values["exp_avg"], values["exp_avg_sq"])
    ]
    codes = [each for each in local if hasattr(each, "codes")]
    return {
        "losses": module.losses,
        "weights": {name: _full(each.detach()).clone() for name, each in module.named_parameters()},
        "bytes": sum(each.codes.nbytes + each.scale.nbytes for each in codes),
        "numbers": sum(each.numel() for each in codes),
    }


def fits(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit several in one call."""
    return [fit(**case) for case in cases]
