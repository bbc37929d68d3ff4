"""Through how many files one attention goes: a Ulysses 2 x ring 2 forward and backward of plain causal attention, on 4 gloo ranks.

    python tools/trace_files.py                        keys travel by messages, as on GPUs
    python tools/trace_files.py --transport shared_memory

It counts on rank 0, between the call of `sequence_parallel_attention` and the end of the backward, the package's files that the attention's
tensors pass through: a file counts if one of its functions is given a tensor of floating point, or returns one, by itself or in a tuple, a list
or a dict. What is only asked (options, plans, groups, layouts) does not count; it is listed behind, for completeness. A change is a call or a
return that leads such a tensor from one of these files to another. The second of two passes is measured: the first makes plans and groups.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import lightning_sp
from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from lightning_sp.testing import RankPool

PACKAGE = Path(lightning_sp.__file__).parent
MOST_FILES = 10


class FileTrace:
    """Collects the files while it is entered; a class because Python's profiler calls back with no state of ours."""

    def __init__(self) -> None:
        self.walk: list[str] = []
        self.asked: set[str] = set()

    def __enter__(self) -> FileTrace:
        # The backward of a CPU tensor runs on the thread that asks for it.
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, result: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(PACKAGE):
            return
        file = str(path.relative_to(PACKAGE))
        self.asked.add(file)
        carried = _arguments(frame) if event == "call" else [result]
        if _holds_tensor(carried) and self.walk[-1:] != [file]:
            self.walk.append(file)


def _arguments(frame: FrameType) -> list[Any]:
    arguments = inspect.getargvalues(frame)
    names = [*arguments.args, *(name for name in (arguments.varargs, arguments.keywords) if name)]
    # A method's own object is no argument that is passed on.
    return [arguments.locals[name] for name in names if name not in ("self", "cls") and name in arguments.locals]


def _holds_tensor(values: Iterable[Any], depth: int = 2) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                return True
        elif depth and isinstance(value, (tuple, list)):
            if _holds_tensor(value, depth - 1):
                return True
        elif depth and isinstance(value, dict) and _holds_tensor(value.values(), depth - 1):
            return True
    return False


def trace(transport: str, method: str) -> tuple[list[str], list[str]]:
    """Return (files in the order of the walk, all files that ran), of this rank."""
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=4)
    mesh = SequenceMesh.build(base, ring_size=2, ulysses_size=2)
    for _ in range(2):
        q, k, v = (torch.randn(1, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
        with FileTrace() as found:
            out = sequence_parallel_attention(
                q, k, v, mesh=mesh, mask=AttentionMask(), ring_transport=transport, ring_method=method
            )
            out.sum().backward()  # type: ignore[no-untyped-call]
    return found.walk, sorted(found.asked)


def main() -> int:
    """Print the files and return 1 where there are more than `MOST_FILES`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="network", help="ring_transport")
    parser.add_argument("--method", default="hops", help="ring_method")
    options = parser.parse_args()
    with RankPool(4) as pool:
        walk, asked = pool.run(trace, options.transport, options.method)[0]
    files = list(dict.fromkeys(walk))
    print(f"{len(files)} files that the tensors pass through, {len(walk) - 1} changes from file to file:")
    print(*(f"  {file} ({walk.count(file)} times)" for file in files), sep="\n")
    print(
        f"{len(asked) - len(files)} files that are only asked: {', '.join(each for each in asked if each not in files)}"
    )
    return int(len(files) > MOST_FILES)


if __name__ == "__main__":
    sys.exit(main())
