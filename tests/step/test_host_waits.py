"""What the host does in a step of training on a device: it waits for one number, while the device has the backward to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot simulate a device",
)
ROOT = Path(__file__).parents[2]
# Two layers.
OF_A_STEP = {
    # Attention: heads out and back, forward and backward, of each layer; keys to the next rank three times, in the backward with gradients.
    ("device collective", "alltoall_base", "comm/collectives.py"): 10,
    ("device collective", "send", "comm/point_to_point.py"): 18,
    ("device collective", "recv", "comm/point_to_point.py"): 18,
    # The loss, forward and backward, and its comparison between ranks.
    ("device collective", "allreduce", "comm/collectives.py"): 2,
    ("device collective", "allreduce", "comm/agreement.py"): 1,
    # What ranks say of a batch, of the parameters that they used, and of the learning rates that they step by.
    ("host collective", "allreduce", "comm/agreement.py"): 3,
    ("copy", "copy to the device", "devices.py"): 1,
    ("copy", "copy to the host", "comm/agreement.py"): 1,
    # Of the loss, before the optimizer's update: whether it is finite.
    ("host wait", "Event.synchronize", "comm/agreement.py"): 1,
}
PLANTED = {
    *("_local_scalar_dense", "nonzero", "index", "equal", "blocking copy to the host", "blocking copy to the device"),
    *("synchronize", "Stream.synchronize"),
}


@cache
def found(*names: str) -> dict[str, Any]:
    """Return what the host does in steps of these kinds."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.step.host_waits", *names]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    steps: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return steps


@pytest.fixture(scope="module")
def whole() -> Counter[tuple[str, str, str]]:
    return _by_file(found("whole")["whole"])


@pytest.fixture(scope="module")
def others() -> dict[str, Counter[tuple[str, str, str]]]:
    return {name: _by_file(each) for name, each in found("planted", "host").items()}


def _by_file(found: dict[str, Any]) -> Counter[tuple[str, str, str]]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for number, kind, what, where in found["lines"]:
        counts[kind, what, where.partition(":")[0]] += number
    return counts


def _is_of_fsdp(line: tuple[str, str, str]) -> bool:
    return line[0] == "device collective" and line[1] in ("allgather_base", "reduce_scatter_base")


def test_a_step_waits_for_the_device_once(whole):
    assert {line: number for line, number in whole.items() if not _is_of_fsdp(line)} == OF_A_STEP


def test_fsdp_has_groups_of_its_own():
    """The sequence is on all ranks: the world's communicator would be the attention's too."""
    groups = {
        (group, what) for _, kind, group, what in found("whole")["whole"]["groups"] if kind == "device collective"
    }
    assert {what for group, what in groups if group == "fsdp_shard"} == {"allgather_base", "reduce_scatter_base"}
    assert {what for group, what in groups if group == "attention"} == {"alltoall_base", "send", "recv"}
    assert {what for group, what in groups if group == "default_pg"} == {"allreduce"}
    assert {group for group, _ in groups} == {"fsdp_shard", "attention", "default_pg"}


@pytest.mark.slow
def test_every_kind_of_wait_is_found_where_a_step_of_documents_makes_it(whole, others):
    found = others["planted"] - whole
    assert {what for _, what, _ in found} == PLANTED
    assert {kind for kind, _, _ in found} == {"host wait"}


@pytest.mark.slow
def test_shards_and_inputs_of_blocks_in_the_hosts_memory_cost_copies_and_no_wait_but_for_gradients(whole, others):
    found = others["host"] - whole
    store = "parallelize/activation_offload/pinned_host.py"
    # The inputs of two blocks leave; one is there still when its backward begins, and the other comes back ahead of its own.
    assert found["copy", "copy to the host", store] == 2
    assert found["copy", "copy to the device", store] == 1
    # 21 parameters are gathered from the host for the forward, and again for the backward: all but the embedding's and the head's.
    copied = [
        each
        for (kind, what, where), each in found.items()
        if kind == "copy" and what == "copy to the device" and where != store
    ]
    assert sum(copied) == 21 + 19
    # Gradients go to memory that is pinned on CUDA alone, where no copy of them is waited for.
    waits = {where: each for (kind, _, where), each in found.items() if kind == "host wait"}
    assert waits == {"parallelize/fsdp/unused_parameters.py": 21}
