"""Faults of how a run is saved: told to end, or while it goes on."""

from __future__ import annotations

from tests.faults.fault import fault

TOLD = "tests/trainer/processes/test_sigterm.py::test_a_run_that_is_told_to_end_saves_and_goes_on_as_if_it_had_not"
STANDS = "tests/trainer/processes/test_sigterm.py::test_what_a_run_ended_with_goes_when_another_stands_for_it"
BACKGROUND = "tests/checkpoint/test_background.py"
EXPIRED = "tests/checkpoint/folders/test_expired.py"
PREEMPTION = "tests/trainer/processes/test_preemption.py"

EXTRA = "tests/checkpoint/contents/test_extra_state.py"

HOSTS = "tests/checkpoint/folders/test_other_hosts.py::test_another_checkpoint_on_a_host_is_refused"

CHECKPOINTS = (
    fault(
        "a model of two hosts' checkpoints",
        "checkpoint/load.py",
        "    check_same_content(path, contents, group)\n",
        "",
        f"{HOSTS}[True]",
        f"{HOSTS}[False]",
    ),
    fault(
        "what of a model's state is no tensor, lost where a folder is read whole",
        "checkpoint/export.py",
        "    return _strip(source, {**state, **objects}, prefix)\n",
        "    return _strip(source, state, prefix)\n",
        f"{EXTRA}::test_a_folder_gives_back_what_is_no_tensor_and_what_hooks_have_added",
    ),
    fault(
        "names for the tensors that hooks have added to a checkpoint",
        "checkpoint/export.py",
        "    checkpoint.update(with_memory(rest, metadata.state_dict_metadata, None, others))\n",
        "",
        f"{EXTRA}::test_a_folder_gives_back_what_is_no_tensor_and_what_hooks_have_added",
    ),
    fault(
        "two runs that write one checkpoint at a time",
        "checkpoint/folders/writing.py",
        "        is_other = True\n",
        "        is_other = False\n",
        "tests/checkpoint/folders/test_writing.py::test_a_run_beside_the_one_that_writes_is_refused[folder]",
        "tests/checkpoint/folders/test_writing.py::test_a_run_beside_the_one_that_writes_is_refused[file]",
    ),
    fault(
        "a signal behind the last batch that the script's next run does not hear of",
        "trainer/processes/sigterm.py",
        "            _unheard.append(self._limit)\n",
        "",
        "tests/trainer/processes/test_sigterm.py::test_a_signal_behind_the_last_batch_ends_the_next_run",
    ),
    fault(
        "a setup that waits on when it was told to end",
        "trainer/processes/sigterm.py",
        "        signal.signal(signal.SIGTERM, _end_soon)\n",
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
        f"{PREEMPTION}::test_a_process_that_is_told_to_end_in_its_setup_does_so_at_once[False-85]",
    ),
    fault(
        "a run that is told to end within a window of accumulation",
        "trainer/processes/sigterm.py",
        "if not trainer.training or _is_last_of_window(trainer):",
        "if any_told:",
        f"{TOLD}[window]",
    ),
    fault(
        "a validation that is cut short and left out",
        "trainer/processes/preemption.py",
        "    _begin_validation_again(trainer)\n    try",
        "    try",
        f"{TOLD}[validation]",
    ),
    fault(
        "weights alone that stand for what a run was told to end with",
        "trainer/processes/preemption.py",
        ' or not checkpoint.get("optimizer_states")',
        "",
        f"{STANDS}[last-preempted.ckpt-last.ckpt-holds3-False]",
    ),
    fault(
        "the signal of a loader's worker taken for this process' own",
        "trainer/processes/time_limit.py",
        "        multiprocessing.util.register_after_fork(self, _listen_no_more)\n",
        "",
        f"{PREEMPTION}::test_a_signal_to_a_worker_of_a_process_is_the_workers_own",
    ),
    fault(
        "a signal while a run ends, whose handler writes to what is closed",
        "trainer/processes/time_limit.py",
        "        self._tells = self._stopped = self._thread = None\n",
        "",
        f"{PREEMPTION}::test_a_signal_while_a_run_ends_is_no_error",
    ),
    fault(
        "a checkpoint of what training has changed since",
        "checkpoint/staged_folder.py",
        'value.detach().to("cpu", copy=True)',
        'value.detach().to("cpu")',
        f"{BACKGROUND}::test_what_changes_after_a_save_has_begun_is_not_saved",
    ),
    fault(
        "an older checkpoint removed before the newer one is complete",
        "checkpoint/background.py",
        "                self._after.append(act)\n                return\n",
        "                act()\n                return\n",
        f"{BACKGROUND}::test_an_older_checkpoint_goes_when_the_newer_one_is_complete",
        f"{BACKGROUND}::test_one_that_fails_is_an_error_on_all_ranks_and_the_one_before_stays",
    ),
    fault(
        "a checkpoint that is too old goes while the newer one is half-written",
        "checkpoint/folders/expired.py",
        "elif each.is_dir() and is_complete(each):",
        "elif each.is_dir() and (each / MANIFEST).exists():",
        f"{EXPIRED}::test_the_newest_complete_one_stays_whatever_is_newer_and_half_written",
    ),
    fault(
        "a save in a store of objects that writes over the one before",
        "checkpoint/save.py",
        "SAVE + str(comm.gather_objects(uuid.uuid4().hex[:12], group)[0])",
        'SAVE + "one"',
        "tests/checkpoint/folders/test_addresses.py::test_the_name_is_of_a_whole_one_at_every_moment[dcp_save]",
    ),
    fault(
        "a store's late error that takes the newer checkpoint with it",
        "checkpoint/save.py",
        "                if not (address / MANIFEST).is_file() or save not in (address / MANIFEST).read_text():\n                    staging",
        "                staging",
        "tests/checkpoint/folders/test_addresses.py::test_an_error_of_the_store_after_the_switch_leaves_the_newer_one",
    ),
    fault(
        "a checkpoint that lacks a lost rank's part, told as one that takes too long",
        "checkpoint/background.py",
        '        late = "another rank, which has a part of it, is gone" if is_lost else _LATE\n',
        "        late = _LATE\n",
        f"{BACKGROUND}::test_a_rank_that_has_lost_another_does_not_wait_long_for_its_part",
    ),
    fault(
        "a folder that cannot be written to, refused without a remedy",
        "checkpoint/save.py",
        '            elsewhere = _ELSEWHERE if is_of_place else ""\n',
        '            elsewhere = ""\n',
        "tests/checkpoint/test_save.py::test_what_cannot_be_saved_is_refused"
        "[below a file-; give a folder that every rank can write to: ModelCheckpoint(dirpath=...)]",
    ),
    fault(
        "an error of a checkpoint that nobody hears of",
        "checkpoint/background.py",
        "        if pending:\n            comm.agree(_failures(pending), group)\n",
        "",
        f"{BACKGROUND}::test_one_that_fails_is_an_error_on_all_ranks_and_the_one_before_stays",
    ),
    fault(
        "a single number that is exported as FSDP2 has it",
        "checkpoint/save.py",
        "        plain[SINGLE_NUMBERS] = single\n",
        "        pass\n",
        "tests/checkpoint/contents/test_single_numbers.py::test_a_folder_resumes_on_other_degrees_and_is_exported_in_its_own_shapes",
    ),
    fault(
        "plain Lightning's state of a single number, which each rank takes whole",
        "checkpoint/contents/state.py",
        "        value = value.reshape(1)\n",
        "        pass\n",
        "tests/checkpoint/contents/test_single_numbers.py::test_a_file_resumes_under_plain_lightning_and_plain_lightnings_here",
    ),
    fault(
        "a checkpoint that is about to be deleted, resumed from",
        "checkpoint/folders/latest.py",
        "    return not path.name.endswith((PARTIAL, REPLACED))\n",
        "    return not path.name.endswith(PARTIAL)\n",
        "tests/checkpoint/folders/test_latest.py::test_one_that_is_being_replaced_is_no_checkpoint",
    ),
    fault(
        "hooks of a resumed run that find the initial weights",
        "trainer/sharded_model.py",
        "        self._is_laid_out = True\n\n",
        "        self._is_laid_out = True\n\n    restore_checkpoint_after_setup = True\n\n",
        "tests/checkpoint/test_restore_order.py::test_hooks_of_a_resumed_run_find_what_was_restored[weights-True]",
    ),
    fault(
        "names of a checkpoint that are compared before the user's hook gives others",
        "trainer/sharded_model.py",
        '            adapted=is_overridden("on_load_checkpoint", module) or loads_by_own_rules(module),\n',
        "            adapted=False,\n",
        "tests/checkpoint/test_restore_order.py::test_hooks_of_a_resumed_run_find_what_was_restored[names-True]",
    ),
    fault(
        "a checkpoint that a hook uploads before it is there",
        "trainer/checkpointing/asynchronous_checkpoints.py",
        "        if callbacks and self._reader:\n",
        "        if False:\n",
        f"{BACKGROUND}::test_what_is_written_at_once",
    ),
    fault(
        "a module that is built of the text of a hyperparameter",
        "trainer/checkpointing/load_from_checkpoint.py",
        "        _check_text(cls, checkpoint, options)\n",
        "",
        "tests/checkpoint/contents/test_containers.py::test_a_module_is_not_built_of_what_became_text",
    ),
    fault(
        "a teacher that is loaded on the meta device",
        "parallelize/meta_device.py",
        "    codes = (_from_pretrained(), _load_from_checkpoint())\n",
        "    codes = (_from_pretrained(),)\n",
        "tests/trainer/checkpointing/test_load_from_checkpoint.py::test_a_teacher_is_loaded_where_a_model_is_built_without_memory",
    ),
)
