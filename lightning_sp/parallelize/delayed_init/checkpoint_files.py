"""`from_pretrained` within `configure_model`: tensors of safetensors files are recipes, and each is read when it is sent.

transformers renames, merges, splits, casts and ties what it reads; it does so here too, on tensors without memory. All it is given is a state
dict of those, in the place of the files' names. Pickles, quantized models and maps of devices are read as ever, whole on each rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.delayed_init.recorder import Recorder

_LOAD = "_load_pretrained_model"
# transformers' threads would read what the recorder, of this thread, does not see.
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"


class PretrainedFiles:
    """Replaces, while a model is built, the method by which transformers reads files.

    A class because transformers may be imported while the model is built: `follow` is called before each tensor is made, and a model is made
    before it is read.

    Args:
        recorder: that is active.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._replaced: tuple[Any, Any] | None = None

    def follow(self) -> None:
        """Replace the method, once transformers is there."""
        if self._replaced is not None or "transformers.modeling_utils" not in sys.modules:
            return
        kind = getattr(sys.modules["transformers.modeling_utils"], "PreTrainedModel", None)
        if kind is None:  # its import is not at its end
            return
        own = vars(kind)[_LOAD]
        self._replaced = (kind, own)
        setattr(kind, _LOAD, classmethod(self._loads_by(own)))

    def release(self) -> None:
        """Give transformers its method back."""
        if self._replaced is not None:
            kind, own = self._replaced
            setattr(kind, _LOAD, own)

    def _loads_by(self, own: Any) -> Callable[..., Any]:
        def load(
            cls: type, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *more: Any, **named: Any
        ) -> Any:
            read = own.__get__(None, cls)
            if reason := _why_whole(state_dict, checkpoint_files, load_config):
                rank_zero_info(
                    f"sequence_parallel: each rank reads the whole of {load_config.pretrained_model_name_or_path} until it is sharded: {reason}"
                )
                with self._recorder.pause():
                    return read(model, state_dict, checkpoint_files, load_config, *more, **named)
            tensors = {name: each for file in checkpoint_files for name, each in self._tensors(file)}
            with _one_thread():
                return read(model, tensors, None, load_config, *more, **named)

        return load

    def _tensors(self, file: str) -> Iterator[tuple[str, Tensor]]:
        for name, stored in stored_tensors(file).items():
            like = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype], device="meta")
            yield name, self._recorder.new(like, read_tensor, file, stored)


# safetensors' names.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where in a safetensors file a tensor's bytes are."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def stored_tensors(file: str) -> dict[str, StoredTensor]:
    """Return what the header of a safetensors file says: 8 bytes with its length, then JSON."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: StoredTensor(
            dtype=each["dtype"],
            shape=tuple(each["shape"]),
            begin=start + each["data_offsets"][0],
            end=start + each["data_offsets"][1],
        )
        for name, each in header.items()
    }


def read_tensor(file: str, stored: StoredTensor) -> Tensor:
    """Read one tensor's bytes. Not by mapping the file: its pages would be in this process' memory beside the tensor.

    Raises:
        SequenceParallelError: the file is shorter than its header says.
    """
    tensor = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype], device="cpu")
    with open(file, "rb") as opened:
        opened.seek(stored.begin)
        read = opened.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0
    if read != tensor.nbytes or stored.end - stored.begin != tensor.nbytes:
        raise SequenceParallelError(
            f"{file} ends within a tensor {stored.shape} of {stored.dtype}: {read} of {tensor.nbytes} bytes are there; fetch it again"
        )
    return tensor


def _why_whole(state_dict: Any, checkpoint_files: Any, load_config: Any) -> str | None:
    """Return why a model is read as ever; None where its files give one tensor at a time."""
    if state_dict is not None:
        return "it is given as a state_dict"
    if load_config.hf_quantizer is not None:
        return "it is quantized while it is read"
    if any(str(device) != "cpu" for device in (load_config.device_map or {}).values()):
        return f"device_map={load_config.device_map!r} puts it on devices"
    if load_config.device_mesh is not None:
        return "a device_mesh splits it"
    if not checkpoint_files:
        return "it has no files"
    for file in map(str, checkpoint_files):
        if not file.endswith(".safetensors"):
            return f"{os.path.basename(file)} is no safetensors file"
    for file in map(str, checkpoint_files):
        for name, stored in stored_tensors(file).items():
            if stored.dtype not in _DTYPES:
                return f"{name} is of dtype {stored.dtype}"
    return None


@contextmanager
def _one_thread() -> Iterator[None]:
    before = os.environ.get(_NO_THREADS)
    os.environ[_NO_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_THREADS]
        else:
            os.environ[_NO_THREADS] = before
