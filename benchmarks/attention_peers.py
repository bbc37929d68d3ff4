"""Attention alone beside the attention of others, in one go: CPU-seconds, wall, bytes, peak memory, error.

    python -m benchmarks.attention_peers --world 4 --lengths 8192              every competitor of this world
    python -m benchmarks.attention_peers --only lightning_sp,torch --world 2   some of them
    python -m benchmarks.attention_peers --kv-heads 2 --lengths 16384          8 query heads share 2 key-value heads; longer
    python -m benchmarks.attention_peers --variants 2x2 --lengths 32768        one scheme of each, where all together do not fit

Every rank of every competitor is a process that waits; a repeat lets each competitor run once, one after the other, each time beginning with
another, so that all meet the same machine; what waits takes memory, half a GiB a process at 16,384 tokens and one at 32,768. The ratio is
within a repeat, to one process with all cores: the median and the middle half. Competitors that are not here have an environment of their own,
made below `.venv-peers/` on first use.

Bytes are those that a rank wrote, by the kernel's own count of its process; beside them the fewest that the same scheme (Ulysses, ring in
zigzag or consecutive order, both) can do with: a ring through shared memory sends none. Peaks are what a run adds to its inputs, in
processes of their own that have run once before, with tensors of 1 MiB and more mapped from the system, so that what is resident is alive.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.instruments.traffic import fewest_sent_bytes
from benchmarks.peers.environments import DEEPSPEED, DEEPSPEED_ENVIRON, TORCH, interpreter
from lightning_sp.testing import free_port

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Peer:
    """A competitor.

    Args:
        name: in the table.
        module: in benchmarks/peers/.
        variants: by world size, name in the table -> what the module is told.
        packages: of its environment, each a pip command's arguments; empty for this one.
        environ: of its processes.
        note: what was changed to run it here, said below the table.
    """

    name: str
    module: str
    variants: dict[int, dict[str, str]]
    packages: tuple[tuple[str, ...], ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    note: str = ""


PEERS = (
    Peer(
        "lightning_sp",
        "lightning_sp_attention",
        {
            2: {"ulysses": "2x1", "ring": "1x2", "ring, network": "1x2 network"},
            4: {"ulysses": "4x1", "ring": "1x4", "ring, network": "1x4 network", "2x2": "2x2", "2x2, network": "2x2 network"},
        },
    ),
    Peer(
        "torch",
        "torch_ring",
        {w: {"ring, allgather": "allgather", "ring, alltoall": "alltoall"} for w in (2, 4)},
        note="torch: its public entry has no CPU kernel, so its ring's core is given the CPU operator (peers/torch_ring.py)",
    ),
    Peer(
        "deepspeed",
        "deepspeed_ulysses",
        {w: {"ulysses": "ulysses"} for w in (2, 4)},
        DEEPSPEED,
        DEEPSPEED_ENVIRON,
    ),
    Peer(
        "ringmaster",
        "ringmaster_attention",
        {w: {"ulysses": "ulysses", "ring": "ring-p2p", "ring, zigzag": "zigzag", "distflash": "distflash"} for w in (2, 4)},
        ((TORCH, "numpy", "transformers"), ("--no-deps", "axolotl-ringmaster==0.2.7")),
    ),
    Peer(
        "yunchang, patched",
        "yunchang_usp",
        {2: {"ring": "1x2"}, 4: {"ring": "1x4", "2x2": "2x2"}},
        ((TORCH, "numpy", "einops"), ("--no-deps", "yunchang==0.6.4")),
        note="yunchang needs a shim on a CPU: its torch kernel has no CPU operator and no backward, and its float32 sums share memory with "
        "what is summed; peers/yunchang_usp.py and _patch_yunchang put these in",
    ),
    Peer(
        "lucidrains, patched",
        "ring_attention_lucidrains",
        {w: {"ring": "ring", "striped": "striped"} for w in (2, 4)},
        ((TORCH, "numpy", "einops", "beartype", "jaxtyping"), ("--no-deps", "ring-attention-pytorch==0.5.20")),
        note="lucidrains' ring-attention-pytorch takes a pair for dK and dV: _patch_lucidrains makes it the first of both",
    ),
)  # fmt: skip
# From the start of a process that measures a peak, as `resident.peak_growth` sets it: malloc.h's own variable.
PEAK_ENVIRON = (("MALLOC_MMAP_THRESHOLD_", str(2**20)),)
CONSECUTIVE = ("ring-p2p", "distflash", "ring")  # rings without zigzag


def scheme(variant: str, world: int) -> tuple[int, int, bool]:
    """Return a variant's Ulysses ranks, ring ranks, and whether its ring is in zigzag order."""
    if "x" in variant:
        ulysses, ring = map(int, variant.split()[0].split("x"))
        return ulysses, ring, True
    return (world, 1, True) if variant == "ulysses" else (1, world, variant not in CONSECUTIVE)


def python_of(peer: Peer) -> str:
    """Return the Python that runs a competitor; make its environment where there is none."""
    return interpreter(peer.module, peer.packages, dict(peer.environ), _PATCHES.get(peer.module))


def _patch_yunchang(folder: Path) -> None:
    """In float32 its buffers share memory with what they are summed from, and its dq is cast to bfloat16 whatever it was."""
    for file in folder.glob("lib/python*/site-packages/yunchang/ring/*.py"):
        text = file.read_text()
        text = text.replace(".to(torch.float32)", ".to(torch.float32, copy=True)")
        file.write_text(text.replace("dq.to(torch.bfloat16)", "dq.to(q.dtype)"))


def _patch_lucidrains(folder: Path) -> None:
    """What goes round the ring comes back with the buffer it was received in, as a pair."""
    for file in folder.glob("lib/python*/site-packages/ring_attention_pytorch/ring_flash_attention.py"):
        file.write_text(file.read_text().replace("dkv = ring_pass(", "dkv, _ = ring_pass("))


_PATCHES = {"yunchang_usp": _patch_yunchang, "ring_attention_lucidrains": _patch_lucidrains}


class Competitor:
    """The waiting processes of one variant; a class because they live from its start to its stop."""

    def __init__(
        self, peer: Peer, label: str, variant: str, world: int, problem: dict[str, Any], reference: Path
    ) -> None:
        self.name, self.peer, self.variant = f"{peer.name} {label}".strip(), peer, variant
        python, port = python_of(peer), free_port()
        self.processes = []
        for rank in range(world):
            environ = {
                **os.environ, **dict(peer.environ), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1" if world > 1 else str(os.cpu_count()), "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore",
            }  # fmt: skip
            command = [
                python,
                "-m",
                "benchmarks.peers.worker",
                peer.module,
                variant,
                json.dumps(problem),
                str(reference),
            ]
            self.processes.append(
                subprocess.Popen(
                    command, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
                )
            )
        try:
            self._read()
        except RuntimeError:
            self.stop()
            raise

    def run(self, what: str = "run") -> dict[str, float]:
        """Let every rank run once; the sum of CPU-seconds, the longest wall, the largest peak and error, MiB sent on average."""
        for process in self.processes:
            assert process.stdin is not None
            print(what, file=process.stdin, flush=True)
        answers = [json.loads(line) for line in self._read()]
        return {
            "cpu_s": sum(a["cpu_s"] for a in answers),
            "wall_s": max(a["wall_s"] for a in answers),
            "peak_mib": max(a["peak"] for a in answers) / 2**20,
            "error": max(a["error"] for a in answers),
            "sent_mib": statistics.mean(a["written"] for a in answers) / 2**20,
        }

    def _read(self) -> list[str]:
        lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not all(lines):
            raise RuntimeError(f"{self.name} ended; what it said is above")
        return lines

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                # Not by reading to the end: what a competitor has started itself may hold it open. What it was told and never read is lost.
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


@contextlib.contextmanager
def competitors(peers: list[Peer], world: int, problem: dict[str, Any]) -> Iterator[list[Competitor]]:
    """Yield one process alone and then every variant; those that cannot start are named and left out."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        reference = Path(folder) / "reference.pt"
        one = Competitor(Peer("one process", "one_process", {}), "", "", 1, problem, reference)
        stack.callback(one.stop)
        started = [one]
        for peer in peers:
            for label, variant in peer.variants.get(world, {}).items():
                try:
                    each = Competitor(peer, label, variant, world, problem, reference)
                except RuntimeError as error:
                    print(f"left out: {error}", flush=True)
                    continue
                stack.callback(each.stop)
                started.append(each)
        yield started


def compare(
    peers: list[Peer], world: int, problem: dict[str, Any], repeats: int, *, peaks: bool = True
) -> list[dict[str, Any]]:
    """Return one row for each competitor that ran; what does not run is named and left out. Without `peaks` those are NaN."""
    with competitors(peers, world, problem) as started:
        checks = {}
        for each in list(started):
            try:
                checks[each.name] = each.run("check")
            except RuntimeError as error:
                print(f"left out: {error}", flush=True)
                each.stop()
                started.remove(each)
        runs: dict[str, list[dict[str, float]]] = {each.name: [] for each in started}
        for repeat in range(repeats):
            first = repeat % len(started)
            for each in started[first:] + started[:first]:
                print(f"repeat {repeat + 1} of {repeats}: {each.name:40}", end="\r", file=sys.stderr, flush=True)
                runs[each.name].append(each.run())
    alone = runs[started[0].name]
    rows = []
    for each in started:
        mine = runs[each.name]
        ratios = sorted(run["cpu_s"] / one["cpu_s"] for run, one in zip(mine, alone, strict=True))
        quarter = len(ratios) // 4
        is_sharded = each is not started[0]
        shared = each.peer.module == "lightning_sp_attention" and "network" not in each.variant
        fewest = (
            (
                math.nan
                if each.variant == "striped"
                else fewest_sent_bytes(scheme(each.variant, world), problem, itemsize=4, shared=shared)
            )
            if is_sharded
            else 0.0
        )
        rows.append(
            {
                "name": each.name,
                "cpu_s": statistics.median(run["cpu_s"] for run in mine),
                "ratio": (statistics.median(ratios), ratios[quarter], ratios[-1 - quarter]),
                "wall_s": statistics.median(run["wall_s"] for run in mine),
                "sent_mib": statistics.median(run["sent_mib"] for run in mine),
                "fewest_mib": fewest / 2**20,
                "peak_mib": peak_mib(each, world if is_sharded else 1, problem) if peaks else math.nan,
                "error": checks[each.name]["error"],
                "note": each.peer.note,
            }
        )
    return rows


def peak_mib(like: Competitor, world: int, problem: dict[str, Any]) -> float:
    """Return the largest rank's peak in new processes, alike for all: their second run, for the first makes libraries and buffers resident."""
    peer = replace(like.peer, environ=(*like.peer.environ, *PEAK_ENVIRON))
    print(f"peak of {like.name:60}", end="\r", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        fresh = Competitor(peer, "", like.variant, world, problem, Path(folder) / "reference.pt")
        try:
            fresh.run()
            return fresh.run("peak")["peak_mib"]
        finally:
            fresh.stop()


def chosen(names: list[str], variants: list[str], world: int) -> list[Peer]:
    """Return the competitors and of each the variants whose names begin so; an empty beginning is every name's."""
    peers = []
    strangers = [name for name in names if not any(peer.name.startswith(name) for peer in PEERS)]
    if strangers:
        raise SystemExit(f"no competitor is called {', '.join(strangers)}: {', '.join(peer.name for peer in PEERS)}")
    for peer in PEERS:
        kept = {
            label: told for label, told in peer.variants.get(world, {}).items() if label.startswith(tuple(variants))
        }
        if kept and peer.name.startswith(tuple(names)):
            peers.append(replace(peer, variants={world: kept}))
    if not peers:
        raise SystemExit(f"no competitor {','.join(names)} has a variant {','.join(variants)} on {world} ranks")
    return peers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=4, choices=(2, 4))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without-peaks", action="store_true", help="measure time alone")
    parser.add_argument("--only", default="", help="names of competitors, comma-separated")
    parser.add_argument(
        "--variants", default="", help="what the names of their variants begin with: ulysses, ring, 2x2"
    )
    arguments = parser.parse_args()
    peers = chosen(arguments.only.split(","), arguments.variants.split(","), arguments.world)
    for length in arguments.lengths:
        problem = {"length": length, "heads": arguments.heads, "kv_heads": arguments.kv_heads, "dim": arguments.dim}
        rows = compare(peers, arguments.world, problem, arguments.repeats, peaks=not arguments.without_peaks)
        print(
            f"\n{problem}, causal, float32, {arguments.world} ranks, {arguments.repeats} repeats, load {os.getloadavg()[0]:.1f}\n"
        )
        print(
            "| | CPU-s | over one process (median, middle half) | wall s (median) | MiB sent per rank | "
            "fewest for the scheme | peak MiB per rank | error |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for row in rows:
            middle, low, high = (100 * (r - 1) for r in row["ratio"])
            print(
                f"| {row['name']} | {row['cpu_s']:.2f} | {middle:+.1f}% ({low:+.1f}..{high:+.1f}%) | "
                f"{row['wall_s']:.2f} | "
                f"{row['sent_mib']:.1f} | {row['fewest_mib']:.1f} | {row['peak_mib']:.0f} | {row['error']:.0e} |"
            )
        for note in dict.fromkeys(row["note"] for row in rows if row["note"]):
            print(f"\n{note}")


if __name__ == "__main__":
    main()
