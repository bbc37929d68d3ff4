"""The peak of memory grows by what is held, and is kept for each rank."""

import numpy as np
import pytest
import torch

from lightning_sp.callbacks import MemoryMonitor
from lightning_sp.callbacks.memory import describe_peak, peak_bytes, peak_resident_bytes
from lightning_sp.callbacks.plot import read_curve
from tests.callbacks.runs import fit

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    # Lightning 2.6's own call of torch's pytree.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


def test_peak_resident_memory_grows_by_what_is_held():
    baseline = peak_resident_bytes()
    held = np.ones(300 * 2**20, dtype=np.uint8)
    grown = peak_resident_bytes()
    assert grown >= held.nbytes
    assert grown >= baseline
    del held
    assert peak_resident_bytes() >= grown - 2**20
    assert peak_bytes(torch.device("cpu")) >= grown - 2**20
    assert describe_peak(torch.device("cpu")) == "resident in the process"
    assert "GPU" in describe_peak(torch.device("cuda"))


def test_memory_is_logged_and_kept_for_each_rank(tmp_path):
    monitor = MemoryMonitor()
    fit(tmp_path, monitor)
    (peak,) = monitor.peak_bytes_of_ranks
    assert 2**26 < peak <= peak_resident_bytes()
    logged = tmp_path / "logs" / "metrics.csv"
    assert len(read_curve(logged, "peak_memory_gib").values) == 6
    (least,), (most,) = (read_curve(logged, f"peak_memory_{name}_gib").values for name in ("min", "max"))
    assert least == most == pytest.approx(peak / 2**30, rel=0.05)
