"""What a user runs on one host: two ranks, each of which says at its last step where it listens.

python -m tests.comm.loopback_run
"""

from __future__ import annotations

import os
import socket
import struct

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from tests.trainer.tiny import Plain, TokenDataset, tiny_llama

_LISTENS = "0A"


def listening() -> set[tuple[str, int]]:
    """Return the addresses and ports at which this process listens for TCP, by /proc."""
    own = set()
    for each in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{each}"))
        except OSError:
            continue
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/self/net/{table}") as lines:
            for line in lines.readlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in own:
                    address, _, port = fields[1].partition(":")
                    packed = bytes.fromhex(address)
                    # Words of four bytes, as the host stores them.
                    words = struct.unpack(f"={len(packed) // 4}I", packed)
                    found.add((socket.inet_ntop(family, struct.pack(f">{len(words)}I", *words)), int(port, 16)))
    return found


class Telling(Plain):
    """Says where its rank listens."""

    def on_train_end(self) -> None:
        print(
            f"rank {self.trainer.global_rank} listens at {', '.join({address for address, _ in listening()})}",
            flush=True,
        )


def main() -> None:
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(preflight=False), accelerator="cpu", devices=2, max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Telling(tiny_llama), DataLoader(TokenDataset(4), batch_size=2))
    assert "GLOO_SOCKET_IFNAME" not in os.environ


if __name__ == "__main__":
    main()
