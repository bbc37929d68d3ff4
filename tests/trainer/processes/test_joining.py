"""Ranks that nobody starts: which variable says that they are, told while this one waits, and with the error."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_sp import SequenceParallelError
from lightning_sp.trainer.processes import joining
from lightning_sp.trainer.processes.joining import check_local_rank, how_started, while_joining

ENDED = "rank 1 (process 12) has ended with code 0"


def started(variables: dict[str, str], *, by_script: bool = False, num_nodes: int = 1) -> str:
    return how_started(
        LightningEnvironment(), by_script=by_script, num_nodes=num_nodes, num_processes=2, variables=variables
    )


def test_a_variable_that_another_run_has_left_is_named():
    left = started({"LOCAL_RANK": "0", "MASTER_PORT": "1234", "HOME": "/root"})
    assert left.startswith(
        "LOCAL_RANK='0' is set, so Lightning starts no ranks: whoever set it is to start 2 on this host"
    )
    assert left.endswith("another run has left it, unset LOCAL_RANK, MASTER_PORT")
    assert started({}, by_script=True) == ""
    assert started({"LOCAL_RANK": "1", "LIGHTNING_SP_STARTED_BY": "12"}) == ""
    assert started({"NODE_RANK": "1"}, by_script=True).startswith("num_nodes=1 has node 0 alone: unset NODE_RANK")
    assert "; num_nodes=3: the script is to be started on each node, with NODE_RANK=0 to 2" in started(
        {"LOCAL_RANK": "0"}, num_nodes=3
    )


def test_a_launcher_that_is_not_there_is_named(monkeypatch):
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    said = how_started(TorchElasticEnvironment(), by_script=False, num_nodes=1, num_processes=4, variables={})
    assert said.startswith("TorchElasticEnvironment was chosen by the variables of a launcher, which is to start all 4")


def test_a_rank_beyond_its_hosts_devices_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "7")
    check_local_rank(1, 2)
    for rank in (7, -1):
        with pytest.raises(SequenceParallelError, match=rf"^this process is rank {rank} of its host, .* has 2 there"):
            check_local_rank(rank, 2)


def join_in_vain(how: str, error: Exception) -> None:
    with while_joining(how, rank=0, size=2):
        time.sleep(0.3)
        raise error


def join_without(ended: str, joined_s: float) -> None:
    joining._LOOK_S = joining._GRACE_S = 0.2
    with while_joining("", rank=0, size=2, gone=lambda: ended):
        time.sleep(joined_s)


@pytest.mark.parametrize(
    ("ended", "joined_s", "code"), [(ENDED, 60.0, 1), (ENDED, 0.3, 0), ("", 1.0, 0)], ids=["waits", "meets", "all"]
)
def test_a_rank_that_waits_for_one_that_has_ended_ends(capfd, ended, joined_s, code):
    """It waits in native code. Of one that has met the others its run says more."""
    waiting = multiprocessing.get_context("fork").Process(target=join_without, args=(ended, joined_s))
    waiting.start()
    waiting.join(20)
    assert waiting.exitcode == code
    said = capfd.readouterr().err
    assert (f"rank 0 of 2 ends: {ended} before the ranks have met: all of them" in said) == bool(code)


def connect(port: int, rank: int, error: Exception | None) -> None:
    joining._LOOK_S = joining._GRACE_S = 0.2
    store = dist.PrefixStore("met", dist.TCPStore("127.0.0.1", port, is_master=False))
    with while_joining("", rank=rank, size=2) as met_in:
        met_in(store)
        if error is not None:
            raise error
        time.sleep(60)  # as in native code, until the other reaches this one


def test_a_rank_that_cannot_connect_ends_those_that_wait_to_be_reached(capfd):
    store, context = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        multiprocessing.get_context("fork"),
    )
    refused = RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: Connection refused")
    ranks = [context.Process(target=connect, args=(store.port, *each)) for each in ((0, refused), (1, None))]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(20)
        assert each.exitcode == 1
    said = capfd.readouterr().err
    assert "SequenceParallelError: the ranks met, and cannot reach one another over gloo: " in said
    (line,) = [each for each in said.splitlines() if each.startswith("sequence_parallel: rank 1 of 2 ends: ")]
    assert "rank 0 on host " in line
    assert " has not connected: SequenceParallelError: the ranks met, and cannot reach one another over gloo" in line


def test_ranks_whose_store_has_ended_do_not_wait(capfd, monkeypatch):
    monkeypatch.setattr(joining, "_SILENT_S", 0.5)
    store, context = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        multiprocessing.get_context("fork"),
    )
    waits = context.Process(target=connect, args=(store.port, 1, None))
    waits.start()
    time.sleep(1.5)
    assert waits.is_alive()
    del store
    waits.join(30)
    assert waits.exitcode == 1
    assert "rank 1 of 2 ends: the store of the ranks, in rank 0's process" in capfd.readouterr().err


def test_a_rank_that_waits_says_for_what(monkeypatch, caplog):
    monkeypatch.setattr(joining, "_SAID_S", 0.05)
    monkeypatch.setattr(joining, "_LOOK_S", 0.02)
    with while_joining("", rank=0, size=2):
        pass
    assert not caplog.records
    with pytest.raises(SequenceParallelError) as told:
        join_in_vain("LOCAL_RANK is set", dist.DistStoreError("of 2 ranks these have not come within 9 s: 1"))
    (record,) = caplog.records
    assert "rank 0 of 2 on host " in record.getMessage()
    assert record.getMessage().endswith(": LOCAL_RANK is set")
    assert "the ranks did not meet at MASTER_ADDR=" in str(told.value)
    assert str(told.value).endswith("(of 2 ranks these have not come within 9 s: 1); LOCAL_RANK is set")
    with pytest.raises(KeyError):
        join_in_vain("", KeyError("the user's own"))
