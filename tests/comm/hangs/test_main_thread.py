"""What a thread does, as another one sees it: whether it moves, in which collective it waits, on which line of the user's."""

from __future__ import annotations

import os
import queue
import threading
import time

import pytest
import torch

from lightning_sp.comm.hangs import main_thread
from lightning_sp.comm.hangs.main_thread import MainThread, place_of, place_of_error, user_threads
from lightning_sp.global_view.user_functions import collectives

TORCH, PACKAGE = (
    os.path.dirname(torch.__file__),
    os.path.dirname(os.path.dirname(os.path.dirname(main_thread.__file__))),
)
MEETINGS = f"{PACKAGE}/comm/meetings/failing_together.py"
C10D = f"{TORCH}/distributed/distributed_c10d.py"


@pytest.fixture
def worker():
    """A thread that makes a MainThread of itself and then does what it is told to; the thread waits while there is nothing."""
    tasks: queue.SimpleQueue = queue.SimpleQueue()
    made: queue.SimpleQueue = queue.SimpleQueue()

    def work():
        made.put(MainThread())
        while (task := tasks.get()) is not None:
            made.put(task())

    thread = threading.Thread(target=work)
    thread.start()
    seen = made.get()
    _settle(seen)
    yield seen, tasks, made
    tasks.put(None)
    thread.join()


def _settle(seen):
    """Look until the thread waits."""
    before = -1
    while seen.moves != before:
        before = seen.moves
        time.sleep(0.02)
        seen.look()


def test_a_thread_that_waits_has_not_moved_and_one_that_computed_has(worker):
    seen, tasks, made = worker
    before = seen.moves
    for _ in range(3):
        seen.look()
    assert seen.moves == before
    assert seen.blocked_s < 60
    tasks.put(lambda: sum(range(300_000)))
    made.get()
    seen.look()
    assert seen.moves == before + 1
    assert seen.blocked_s == 0.0
    _settle(seen)
    moves = seen.moves
    time.sleep(0.02)
    seen.look()
    assert seen.moves == moves
    assert seen.blocked_s > 0.01


def test_looks_that_are_far_apart_begin_anew(worker, monkeypatch):
    seen, _, _ = worker
    before, now = seen.moves, main_thread.time.monotonic()
    monkeypatch.setattr(main_thread.time, "monotonic", lambda: now + 600.0)
    seen.look()
    assert seen.moves == before + 1
    assert seen.blocked_s == 0.0


def test_the_place_is_the_line_of_this_file(worker):
    seen, tasks, made = worker
    inside, on = threading.Event(), threading.Event()
    tasks.put(lambda: (inside.set(), on.wait()))
    inside.wait()
    place = seen.place()
    on.set()
    made.get()
    assert place.collective == ""
    assert "test_main_thread.py:" in place.line
    assert place.line.endswith("in <lambda>")
    assert place.stack[-1].endswith(("in wait", "in <lambda>"))


@pytest.mark.parametrize(
    ("stack", "collective"),
    [
        ([(C10D, 9, "barrier"), (f"{TORCH}/distributed/c10d_logger.py", 3, "wrapper"), ("/me/train.py", 4, "step")],
         "barrier, called in /me/train.py:4 in step"),
        ([(C10D, 9, "all_reduce"), (f"{PACKAGE}/comm/agreement.py", 3, "agree"), (f"{PACKAGE}/data/batch/x.py", 4, "shard"),
          ("/me/t.py", 1, "m")],
         "agree (all_reduce), called in lightning_sp/data/batch/x.py:4 in shard"),
        # A functional collective of a DTensor: the innermost line is that of torch's operators.
        ([(f"{TORCH}/_ops.py", 1, "__call__"), (f"{TORCH}/distributed/_functional_collectives.py", 2, "wait_tensor"),
          (f"{TORCH}/distributed/tensor/_api.py", 3, "full_tensor"), ("/me/t.py", 8, "norm")], "wait_tensor, called in /me/t.py:8 in norm"),
        # A mode of torch's that sees each call.
        ([(C10D, 9, "all_reduce"), (f"{PACKAGE}/parallelize/meta_device.py", 3, "__torch_function__"), (f"{TORCH}/overrides.py", 5, "handle"),
          (C10D, 9, "all_reduce"), ("/me/t.py", 8, "norm")], "all_reduce, called in /me/t.py:8 in norm"),
        # What is asked of each collective that a user calls.
        ([(C10D, 9, "all_reduce"), (collectives.__file__, 3, "collective"), ("/me/t.py", 8, "norm")],
          "all_reduce, called in /me/t.py:8 in norm"),
        # A file that is written, in a checkpoint of torch's, is no wait for ranks.
        ([(f"{TORCH}/distributed/checkpoint/filesystem.py", 1, "write"), ("/me/t.py", 8, "save")], ""),
        ([("/me/t.py", 8, "sleep"), (C10D, 9, "barrier")], ""),
        # Where ranks of a trial meet before it.
        ([(MEETINGS, 9, "meet"), (MEETINGS, 7, "check_peers"), (f"{PACKAGE}/comm/collectives.py", 3, "gather"), ("/me/t.py", 8, "norm")],
         "gather, called in /me/t.py:8 in norm"),
        ([(MEETINGS, 9, "meet"), (MEETINGS, 7, "check_peers"), (f"{PACKAGE}/attention/operator.py", 3, "attention_op"), ("/me/t.py", 8, "norm")],
         "check_peers, called in lightning_sp/attention/operator.py:3 in attention_op"),
    ],
    ids=["torch", "comm", "functional", "mode", "asked", "file", "hook", "meeting", "meeting of attention"],
)  # fmt: skip
def test_a_collective_is_known_by_the_innermost_lines(stack, collective):
    place = place_of(stack)
    assert place.collective == collective
    assert place.line.startswith("/me/t")


@pytest.mark.parametrize(
    "file", ["<frozen runpy>", "<string>", "<eval_with_key>.3", "/tmp/torchinductor_me/ab/cd.py", f"{TORCH}/_tensor.py"]
)
def test_code_that_no_user_has_written_is_no_line_of_the_users(file):
    assert place_of([(file, 1, "f"), ("/me/train.py", 4, "step")]).line == "/me/train.py:4 in step"
    assert place_of([(file, 1, "f")]).line == ""


def test_an_error_is_placed_where_it_was_raised():
    def fails():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        torch.utils._pytree.tree_map(lambda _: fails(), [1])
    assert place_of_error(caught.value).line.endswith("in fails")


def test_a_users_thread_beside_the_main_one_is_seen():
    go_on = threading.Event()

    def waits():
        go_on.wait()

    assert not user_threads()
    thread = threading.Thread(target=waits)
    thread.start()
    try:
        assert user_threads()
    finally:
        go_on.set()
        thread.join()
    assert not user_threads()
