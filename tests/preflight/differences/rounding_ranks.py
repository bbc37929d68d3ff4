"""What each rank runs in test_rounding.py; returns plain values."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

from tools.flows.ranks import alarm
from tools.flows.registry import Flow


def said(topic: str, name: str, factor: float = 1.0) -> dict[str, Any]:
    """Run a flow in bf16-mixed; return whether it is refused.

    Args:
        topic: of the flow.
        name: of the flow.
        factor: of what attention gives on shards, where it is in bfloat16: a kernel that is wrong in that dtype alone.
    """
    import lightning_sp.rewrite.hugging_face.attention as rewrite

    own = rewrite.attend

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        out = own(*args, **options)
        return out * factor if out.dtype == torch.bfloat16 else out

    patched = mock.patch.object(rewrite, "attend", wrong) if factor != 1 else nullcontext()
    # The global view has the model's own attention, and is right.
    on_parts = mock.patch.object(Flow, "strategy_options", {"global_view": factor == 1 and "auto"})
    with tempfile.TemporaryDirectory() as folder, patched, on_parts:
        return alarm(Flow(topic, name), "ulysses 2", folder, "bf16-mixed")
