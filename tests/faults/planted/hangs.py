"""Faults of what is said of a hang: a run that is ended without one, and a rank that is not named."""

from __future__ import annotations

from tests.faults.fault import fault

REPORTS = "tests/comm/hangs/test_report.py"
MAY_GO_ON = f"{REPORTS}::test_a_rank_that_may_go_on_is_no_deadlock"

HANGS = (
    fault(
        "a slow transfer taken for a deadlock",
        "comm/hangs/report.py",
        " and own.since_s >= STUCK_S and own.is_quiet",
        " and own.since_s >= STUCK_S",
        f"{MAY_GO_ON}[changes3]",
    ),
    fault(
        "a rank that computes taken for one that waits",
        "comm/hangs/report.py",
        "waits = own is not None and own.state is State.WAITS and own.since_s",
        "waits = own is not None and own.since_s",
        f"{MAY_GO_ON}[changes1]",
    ),
    fault(
        "old words of a rank taken for those of now",
        "comm/hangs/report.py",
        "return waits and self.age_s < FRESH_S",
        "return waits",
        f"{REPORTS}::test_old_reports_say_nothing",
    ),
    fault(
        "one collective whose bytes are on their way taken for a deadlock",
        "comm/hangs/report.py",
        "return len(waits) > 1 or (",
        "return len(waits) > 0 or (",
        f"{MAY_GO_ON}[changes0]",
    ),
    fault(
        "a rank between two runs taken for one that has left",
        "comm/hangs/report.py",
        "each.is_in(run) and (each.is_stuck",
        "(each.is_stuck",
        f"{REPORTS}::test_a_rank_whose_last_run_has_ended_may_begin_the_next_one",
    ),
    fault(
        "bytes that nobody has read taken for none",
        "comm/hangs/traffic.py",
        "in_flight=bool(unacked or not_sent or _has_unread(connection))",
        "in_flight=bool(unacked or not_sent)",
        "tests/comm/hangs/test_traffic.py::test_bytes_that_nobody_reads_are_on_their_way",
    ),
    fault(
        "a file that is written in a checkpoint taken for a wait for ranks",
        "comm/hangs/main_thread.py",
        "each[0].startswith(_COMM) or each[0] in _TORCH_WAITS",
        'each[0].startswith(_COMM) or "/torch/distributed/" in each[0]',
        "tests/comm/hangs/test_main_thread.py::test_a_collective_is_known_by_the_innermost_lines[file]",
    ),
    fault(
        "a process that was stopped for a while taken for one that waited",
        "comm/hangs/main_thread.py",
        "cpu_s - before < _MOVED_S and gap < _GAP_S",
        "cpu_s - before < _MOVED_S",
        "tests/comm/hangs/test_main_thread.py::test_looks_that_are_far_apart_begin_anew",
    ),
    fault(
        "an error of rank 0 that ends with its store",
        "comm/hangs/watch.py",
        "self._meeting.wait_for_all(STAYS_S)",
        "pass",
        "tests/comm/hangs/test_meeting.py::test_an_error_of_rank_0_is_told_before_it_leaves",
    ),
    fault(
        "a life of a run that reads what an earlier one has left in the store",
        "comm/fresh_store.py",
        "uuid.uuid4().hex",
        "str(rank)",
        "tests/comm/test_fresh_store.py::test_lives_in_one_store_have_prefixes_of_their_own",
    ),
    fault(
        "a rank of another run on the same port taken for one of this",
        "comm/fresh_store.py",
        "{run or 'by_hand'}",
        "by_hand",
        "tests/comm/test_fresh_store.py::test_ranks_of_two_runs_do_not_meet_at_one_port",
    ),
    fault(
        "ranks that were told other numbers of ranks, and wait for some that nobody starts",
        "comm/fresh_store.py",
        '        if store.check(["other"]):\n',
        "        if False:\n",
        "tests/comm/test_fresh_store.py::test_ranks_that_were_told_other_numbers_of_ranks_are_told_both",
    ),
    fault(
        "a LOCAL_RANK that another run has left, waited on without a word",
        "trainer/processes/joining.py",
        "    if by_script or STARTED_BY in variables:\n",
        '    if by_script or "LOCAL_RANK" in variables:\n',
        "tests/trainer/processes/test_joining.py::test_a_variable_that_another_run_has_left_is_named",
    ),
    fault(
        "a rank that destroys its groups taken for one that was killed",
        "comm/hangs/runs.py",
        "when_destroyed(world, runs.end)",
        "when_destroyed(world, runs.channel.close)",
        "tests/comm/hangs/test_meeting.py::test_a_rank_that_destroys_its_groups_in_a_run_is_named",
    ),
    fault(
        "a run that waits for something else than a rank, without a word",
        "comm/hangs/watch.py",
        "            elif place is not None and not waits and not self._is_asked:\n",
        "            elif False:\n",
        "tests/comm/hangs/test_meeting.py::test_a_wait_for_something_else_than_a_rank_is_told_once",
    ),
    fault(
        "a rank that works before its first batch taken for an idle one",
        "comm/hangs/idle.py",
        "        if (threads or processes) and not is_first:\n",
        "        if False:\n",
        "tests/comm/hangs/test_idle.py::test_a_thread_that_computes_is_work",
    ),
    fault(
        "a rank that is not idle yet, ended",
        "comm/hangs/report.py",
        "if all(_is_idle(each, limit_s) for each in late) else []\n",
        "if any(_is_idle(each, limit_s) for each in late) else []\n",
        "tests/comm/hangs/test_idle.py::test_a_run_ends_where_all_that_others_wait_for_do_nothing",
    ),
    fault(
        "a rank that works behind its run taken for an idle one",
        "comm/hangs/idle.py",
        "        if self._since is None or any(used != before.get(each) for each, used in self._ticks.items()):\n",
        "        if self._since is None:\n",
        "tests/comm/hangs/test_idle.py::test_another_process_that_computes_is_work_and_one_that_sleeps_is_not[computes]",
    ),
    fault(
        "a rank that stays behind rank 0's script, left there",
        "trainer/processes/other_ranks.py",
        "            _end(running)\n",
        "",
        "tests/trainer/processes/test_launchers.py::test_a_rank_that_stays_behind_the_script_is_ended_and_its_lines_are_shown",
    ),
    fault(
        "a silent rank whose silence is not counted",
        "comm/hangs/meeting.py",
        "            silent_s=silent_s if silent_s > SILENT_S else 0.0,\n",
        "            silent_s=0.0,\n",
        "tests/comm/hangs/test_meeting.py::test_a_rank_that_says_nothing_is_silent_from_the_first_question_on",
    ),
    fault(
        "an error of one rank that has no text, and is told to nobody",
        "errors.py",
        '    except Exception as failed:\n        return f"(its __str__',
        '    except SystemExit as failed:\n        return f"(its __str__',
        "tests/comm/hangs/test_raised.py::test_a_text_that_fails_has_its_class_all_the_same",
    ),
    fault(
        "an error of a loader's worker, told by torch's own first line",
        "comm/hangs/raised.py",
        "    if _OF_WORKER not in first or not files:\n",
        "    if True:\n",
        "tests/comm/hangs/test_raised.py::test_an_error_of_a_loaders_worker_is_that_of_its_line",
    ),
    fault(
        "an error behind a run, of which those who wait for it there are not told",
        "comm/hangs/runs.py",
        '    meeting.end(f"rank {rank} {why}, behind run {runs.number}")\n',
        "",
        "tests/comm/hangs/test_meeting.py::test_a_rank_whose_script_fails_behind_a_run_is_named_where_others_wait_for_it",
    ),
    fault(
        "a rank behind its run that stays when the process that started it is gone",
        "trainer/processes/parent.py",
        "            _end_with_parent(signal.SIGTERM)\n",
        "            pass\n",
        "tests/trainer/processes/test_launchers.py::test_a_rank_ends_with_the_process_that_started_it[behind its run]",
    ),
)
