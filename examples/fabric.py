"""A training loop of one's own with Lightning Fabric, in place of the Trainer: the same parts, called one by one.

    python examples/fabric.py --devices 2 --accelerator cpu --ring-size 2

Fabric starts the processes and chooses the device. It prints each step's loss, which is that of one device.
"""

import argparse
from datetime import timedelta

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_sp import ShardOptions, shard_batch
from lightning_sp.comm import host_groups
from lightning_sp.config import StrategyConfig
from lightning_sp.context.step import SequenceContext
from lightning_sp.step.meshes import attention_mesh, base_mesh
from lightning_sp.step.prepare import interceptions, lay_out_model
from lightning_sp.step.runner import StepRunner


def build() -> tuple[LlamaForCausalLM, torch.Tensor]:
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).double()  # type: ignore[arg-type]
    return model, torch.randint(256, (32, 64))


def train(fabric: Fabric, config: StrategyConfig, max_steps: int) -> list[float]:
    fabric.seed_everything(0, verbose=False)
    model, tokens = build()
    base = base_mesh(config, fabric.device, fabric.world_size)
    mesh = attention_mesh(model, config, base, fabric.device, fabric.strategy.num_processes)  # type: ignore[attr-defined]
    groups = host_groups(mesh.sequence_group, timedelta(seconds=config.timeout_s))
    # A whole sequence for all ranks that share it: a sampler over the data-parallel groups, which Fabric must leave as it is.
    sampler = DistributedSampler(tokens, mesh.data_parallel_size, mesh.data_parallel_rank)  # type: ignore[arg-type]
    loader = DataLoader(tokens, batch_size=4 // mesh.data_parallel_size, sampler=sampler)  # type: ignore[arg-type]

    lay_out_model(model, config, mesh, fabric.device, groups.world)  # FSDP2, in place
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    context = SequenceContext(mesh, config.attention)
    steps = StepRunner(model, context, groups=groups, device=fabric.device)
    losses = []
    with interceptions(context, model, config):
        for input_ids, _ in zip(loader, range(max_steps), strict=False):
            batch = {"input_ids": input_ids, "labels": input_ids}
            local, info = shard_batch(batch, mesh.layout, mesh.sequence_rank, ShardOptions(model_shifts_labels=True))
            local, info = fabric.to_device(local), info.to(fabric.device)
            loss = steps.train(info, lambda local=local: model(**local).loss)
            loss.backward()
            steps.end()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            fabric.print(f"step {len(losses)}: loss {losses[-1]:.6f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--ring-size", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=5)
    options = parser.parse_args()
    fabric = Fabric(accelerator=options.accelerator, devices=options.devices, strategy="ddp")
    fabric.launch()
    train(fabric, StrategyConfig(ring_size=options.ring_size), options.max_steps)


if __name__ == "__main__":
    main()
