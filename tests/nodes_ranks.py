"""What `test_nodes` runs on real ranks."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import log, rank_zero_only

from lightning_sp.config import StrategyConfig
from lightning_sp.models import Llama, LlamaConfig
from lightning_sp.step.meshes import attention_mesh, base_mesh


def split_and_said(per_node, given):
    """Return (ulysses, ring) of 4 query heads over one key-value head, and what is logged meanwhile.

    Args:
        per_node: ranks of a node, for each rank its own if it is a list.
        given: degrees.
    """
    rank_zero_only.rank = dist.get_rank()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        config, device = StrategyConfig(**given), torch.device("cpu")
        model = Llama(LlamaConfig(vocab_size=8, dim=16, num_layers=1, num_heads=4, num_kv_heads=1))
        number = per_node[dist.get_rank()] if isinstance(per_node, list) else per_node
        mesh = attention_mesh(model, config, base_mesh(config, device, dist.get_world_size()), device, number)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    return (mesh.layout.ulysses_size, mesh.layout.ring_size), "\n".join(lines)
