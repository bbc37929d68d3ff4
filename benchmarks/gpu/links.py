"""Two ranks on one device by NCCL: tried, for what it says is worth a line in the log."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu.part import Case, Part, Row, Setting

_RANK = """
import os, torch, torch.distributed as dist
device = torch.device(os.environ["KIT_DEVICE"])
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
x = torch.ones(4, device=device)
dist.all_reduce(x)
print(x.tolist(), flush=True)
dist.destroy_process_group()
"""


def two_ranks(setting: Setting) -> Row:
    """Return what two ranks of one device say of an all_reduce."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "KIT_DEVICE": setting.device,
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=60)[0].strip().splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return {"works": all(rank.returncode == 0 for rank in ranks), "says": said[0][-1] if said[0] else ""}


def _links(setting: Setting) -> Iterator[Case]:
    yield "all_reduce of two ranks on one device", partial(two_ranks, setting)


LINKS = Part("two ranks of one device", 90, _links)
