"""The ring through shared memory: bit-equal to the network, which carries none of it; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from benchmarks.instruments.traffic import ulysses_sent_elements
from lightning_sp.attention.schemes.head_split import HeadSplit
from lightning_sp.layout import SequenceLayout
from lightning_sp.testing import RankPool, assert_sharded_equals_unsharded, run_ranks
from tests.attention.ranks.attention_ranks import whole
from tests.attention.ranks.operator_ranks import local_results, traffic
from tests.comm.cpu import shared_memory_ranks as ranks
from tests.drawn_cases.covering import covering

DEGREES = pytest.mark.parametrize("degrees", [(1, 4), (2, 2)], ids=["1x4", "2x2"])
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROWS = [
    {"method": method, "causal": causal, "dtype": dtype, "degrees": degrees}
    for method in ("hops", "all_gather")
    for causal in (True, False)
    for dtype in DTYPES
    for degrees in ((1, 4), (2, 2))
]
FEW = covering(ROWS, num_axes=1)


def row_id(row):
    degrees = "x".join(map(str, row["degrees"]))
    return f"{row['method']}-{'causal' if row['causal'] else 'full'}-{row['dtype']}-{degrees}"


@pytest.mark.parametrize(
    ("method", "causal", "dtype", "degrees"),
    [
        pytest.param(*row.values(), id=row_id(row), marks=() if i in FEW else pytest.mark.slow)
        for i, row in enumerate(ROWS)
    ],
)
def test_bit_equal_to_the_network(pools, degrees, dtype, causal, method):
    # Growing, shrinking and growing again: an arena is that of the longest so far.
    for seed, length in enumerate((32, 64, 16, 128)):
        case = (*degrees, 6, 2, length, 8, dtype, seed, causal)
        ours, theirs = (
            pools(4).run(local_results, *case, transport, method) for transport in ("shared_memory", "network")
        )
        for rank in range(4):
            for mine, other in zip(ours[rank], theirs[rank], strict=True):
                assert torch.equal(mine, other)


@DEGREES
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_exchange_of_heads_alone_travels_by_the_network(pools, degrees, causal):
    ulysses, ring = degrees
    layout, split, heads, length, dim = SequenceLayout(ring, ulysses), HeadSplit(8, 8, ulysses), 8, 64, 8
    answers = pools(4).run(traffic, *degrees, heads, heads, length, dim, torch.float32, causal, None, "shared_memory")
    for rank, measured in enumerate(answers):
        _, place = layout.coordinates(rank)
        exchanged = ulysses_sent_elements(split, place, batch=1, tokens=length // layout.size, dim=dim)
        for elements, num_calls, (sent, calls) in zip(exchanged, (2, 3), measured, strict=True):
            assert sent == elements * 4
            assert calls == ({"all_to_all_single": num_calls} if ulysses > 1 else {})


@pytest.mark.parametrize(
    ("method", "degrees"),
    [
        pytest.param("hops", (1, 4), id="hops-1x4"),
        pytest.param("hops", (2, 2), id="hops-2x2"),
        pytest.param("hops", (1, 3), id="hops-1x3", marks=pytest.mark.slow),
        pytest.param("all_gather", (1, 4), id="all_gather-1x4", marks=pytest.mark.slow),
        pytest.param("all_gather", (2, 2), id="all_gather-2x2"),
        pytest.param("all_gather", (1, 3), id="all_gather-1x3", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_are_out_of_step_never_read_what_is_being_overwritten(pools, degrees, method):
    world = degrees[0] * degrees[1]
    ours, theirs = (pools(world).run(ranks.out_of_step, *degrees, t, method, 12) for t in ("shared_memory", "network"))
    for mine, other in zip(ours, theirs, strict=True):
        for call, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert [torch.equal(x, y) for x, y in zip(a, b, strict=True)] == [True] * 4, f"call {call}"


def test_two_rings_of_one_world_side_by_side(pools):
    expected = whole(heads=4, kv_heads=2, length=37, mask={})
    for answer in pools(4).run(ranks.data_parallel_rings, "shared_memory"):
        assert_sharded_equals_unsharded(answer, expected, ("out", "dq", "dk", "dv"))


@pytest.fixture
def folder(tmp_path):
    """Make a folder of shared memory of 4 MiB, our own, so that what it holds is known; None without the right to."""
    place = tmp_path / "shm"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, check=False
    )
    yield place if made.returncode == 0 else None
    if made.returncode == 0:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


# Local keys and values of 4 heads of 256 in float64: 16 KiB a token.
FITS, FITS_FORWARD, TOO_LONG = 32, 128, 1024


def test_too_little_memory_takes_the_network_and_warns_once(folder):
    free = None if folder else 2**20
    lengths = (FITS, TOO_LONG, TOO_LONG, FITS)
    ranked = run_ranks(ranks.attend_in, 4, folder or "/dev/shm", free, 4, lengths, "auto")
    for rank, (answers, warned, used) in enumerate(ranked):
        assert [same for same, _ in answers] == [True] * 4
        sent = [bytes_sent for _, bytes_sent in answers]
        assert sent[0] == sent[3] == 0
        assert sent[1] == sent[2] > 2**20
        assert len(warned) == (1 if rank == 0 else 0), warned
        # What other ranks had got before one got nothing was given back: 3 places of 128 KiB and a page each.
        assert folder is None or used == 4 * (3 * FITS // 4 * 16384 + 4096)
    assert (
        "ring_transport='auto' takes the network: the ring needs 4.0 MiB of shared memory on each of 4 ranks"
        in warned_text(ranked)
    )
    assert f"{folder or '/dev/shm'} has {'2.5' if folder else '1.0'} MiB free" in warned_text(ranked)


def warned_text(ranked):
    return ranked[0][1][0]


def test_memory_that_is_enough_for_some_ranks_is_enough_for_none(folder):
    if folder is None:
        pytest.skip("needs the right to mount a tmpfs")
    # 1 MiB a rank in the forward: all four fit in neither 4 MiB beside the first pages nor in what three leave.
    for answers, warned, used in run_ranks(ranks.attend_in, 4, folder, None, 4, (2 * FITS_FORWARD,), "auto"):
        assert answers[0][0]
        assert used == 4 * 4096
        assert len(warned) <= 1


def test_too_little_memory_is_refused_where_it_was_asked_for(folder):
    free = None if folder else 2**20
    for answers, warned, _ in run_ranks(
        ranks.attend_in, 2, folder or "/dev/shm", free, 2, (FITS, TOO_LONG), "shared_memory"
    ):
        assert answers[0][0]
        assert answers[1].startswith(
            "ring_transport='shared_memory': the ring needs 8.0 MiB of shared memory on each of 2 ranks, "
        )
        assert answers[1].endswith("or use ring_transport='network'")
        assert not warned


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("folder", "no shared memory can be made in /nowhere ([Errno 2] No such file or directory: '/nowhere')"),
        ("process", "rank 1"),
        ("machine", "the ranks are on 2 machines, "),
    ],
)
def test_ranks_that_cannot_share_memory_are_found_once_and_by_all(how, words):
    if how == "machine" and os.geteuid():
        pytest.skip("needs the right to give a process a host name of its own")
    answers = run_ranks(ranks.apart, 3, how)
    assert len({why for why, *_ in answers}) == 1
    for why, refused, calls, same in answers:
        assert words in why
        assert (
            refused
            == f"ring_transport='shared_memory': {why}; it is for CPU ranks of one machine; use 'network', or 'auto'"
        )
        assert calls == {}
        assert same


def test_it_goes_with_its_process_group_and_comes_with_the_next():
    for counts, same in run_ranks(ranks.two_worlds, 4):
        assert same
        # Two ranks' files, open, kept by the mapping, and mapped.
        assert counts == [0, 6, 0, 6, 0]


def test_a_store_held_beyond_its_world_takes_nothing_from_the_next_one():
    assert run_ranks(ranks.outlived_by_its_store, 2, timeout_s=10) == [(True, True)] * 2


def test_nothing_is_left_when_all_ranks_are_killed(folder, tmp_path):
    place, begun = folder or Path("/dev/shm"), tmp_path / "begun"
    begun.mkdir()
    before, used = names(place), ranks.used_bytes(place)
    with RankPool(4) as pool:
        for tasks in pool._tasks:
            tasks.put((ranks.attend_for_ever, (place, begun)))
        end = time.monotonic() + 60
        while len(list(begun.iterdir())) < 4 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(list(begun.iterdir())) == 4
        assert folder is None or ranks.used_bytes(place) > used
        for process in pool._processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in pool._processes:
            process.join(30)
    assert names(place) == before
    assert folder is None or ranks.used_bytes(place) == used


@pytest.mark.parametrize(
    ("how", "said", "silent"), [("raise", "boom on rank 2", [0, 1, 3]), ("kill", "rank 2 of the ring has ended", [2])]
)
def test_nothing_is_left_when_one_rank_fails_and_nobody_waits_for_one_that_has_ended(folder, how, said, silent):
    place = folder or Path("/dev/shm")
    before, used = names(place), ranks.used_bytes(place)
    with pytest.raises(RuntimeError, match=said) as raised:
        run_ranks(ranks.raise_in_mid_run, 4, place, how, timeout_s=60, others_s=1 if how == "raise" else 2)
    # One that raised and lives may go on with another pass: it is waited for, here until the pool ends.
    told = "no answer from ranks {} within" if how == "raise" else "ranks {} have ended without an answer"
    assert told.format(silent) in str(raised.value)
    assert names(place) == before
    assert folder is None or ranks.used_bytes(place) == used


@pytest.fixture(scope="module")
def four():
    """Four ranks that wait 20 s for each other, for all that must go on after an error: what an error leaves meets the next test too."""
    started = []

    def run(function, *args):
        if not started or started[-1].failure is not None:
            started.append(RankPool(4, timeout_s=20))
        return started[-1].run(function, *args)

    yield run
    for pool in started:
        pool.close()


@pytest.mark.parametrize("transport", ["shared_memory", "network", "network+saved"])
@pytest.mark.parametrize(
    ("step", "hop"), [("forward_step", 0), ("forward_step", 2), ("backward_step", 0), ("backward_step", 3)]
)
def test_after_an_error_that_was_caught_the_next_passes_are_right_and_wait_for_nothing(four, transport, step, hop):
    assert four(ranks.abandon, transport, step, [hop] * 4, 3) == [True] * 4


@pytest.mark.parametrize("transport", ["shared_memory", "network"])
@pytest.mark.parametrize("step", ["forward_step", "backward_step"])
def test_after_an_error_in_what_was_gathered_too(four, transport, step):
    assert four(ranks.abandon, transport, step, [0] * 4, 3, "all_gather") == [True] * 4


@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("network", marks=pytest.mark.slow)])
def test_a_pass_in_which_ranks_failed_in_different_hops_is_never_taken_for_the_next(transport):
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        # What waits for its time limit waits at once.
        both = [
            threads.submit(
                stack.enter_context(RankPool(4, timeout_s=5)).run, ranks.abandon, transport, step, [1, 3, 2, 1], 1
            )
            for step in ("forward_step", "backward_step")
        ]
        answers = [answer for each in both for answer in each.result()]
    assert len(answers) == 8
    for answer in answers:
        # The network waits in vain for a hop that another rank never began, and is at its end after that.
        loud = "of the ring waited 5 s", "Timed out waiting 5000ms", "Application timeout", "Connection closed by peer"
        assert answer is True or any(words in answer for words in loud), answer


def test_a_rank_that_failed_alone_when_all_was_sent_goes_on_with_the_others():
    assert run_ranks(ranks.one_fails_before_all_has_come, 4, timeout_s=20) == [True] * 4


def test_signals_do_not_pile_up():
    assert run_ranks(ranks.signals_kept, 4, 20, timeout_s=20) == [0] * 4


def test_the_cause_of_an_error_is_said_where_another_rank_has_ended():
    with pytest.raises(RuntimeError, match="ValueError: the cause on rank"):
        run_ranks(ranks.an_error_beside_a_dead_rank, 4, timeout_s=20, others_s=0.5)


def names(place):
    """Return what lies in a folder of shared memory, but for the semaphores of other processes' queues."""
    return {name for name in os.listdir(place) if not name.startswith("sem.")}
