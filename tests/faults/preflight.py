"""Faults of the preflight: what it would no longer see, and what it would leave behind; and of weights that a step writes to."""

from __future__ import annotations

from tests.faults.fault import fault

PREFLIGHT_TEST = "tests/preflight/test_preflight.py"
STOPPED = f"{PREFLIGHT_TEST}::test_what_is_not_exact_is_stopped"

PREFLIGHT = (
    fault(
        "numbers that training_step logs, not looked at",
        "preflight/training_numbers.py",
        "    if not any(comm.gather_objects(others, trial.control_group)):\n",
        "    if True:\n",
        "tests/preflight/test_training_numbers.py::test_a_monitored_number_of_a_shard_is_refused_on_all_ranks",
    ),
    fault(
        "predictions not looked at",
        "preflight/outputs.py",
        "(how := _difference(own, one, tolerance, part))",
        "(how := _difference(one, one, tolerance, part))",
        "tests/preflight/test_predictions.py::test_what_a_shard_makes_is_refused_on_all_ranks[text-output 0 of 2: ']",
    ),
    fault(
        "a write to a sharded weight's row that is lost",
        "parallelize/fsdp/sharded_parts.py",
        "    if home is None:\n",
        "    if True:\n",
        "tests/parallelize/fsdp/test_sharded_tensors.py::test_a_write_to_a_part_reaches_the_whole",
    ),
    fault(
        "random numbers that each shard draws alike",
        "parallelize/fsdp/sharded_parts.py",
        "_drawing(original) if name in _RANDOM else _writing(original)",
        "_writing(original)",
        "tests/parallelize/fsdp/test_sharded_tensors.py::test_random_numbers_are_those_of_the_whole",
    ),
    fault(
        "ranks that monitor numbers of their own",
        "trainer/agreed_numbers.py",
        "    return {name: each for name, each in values.items() if not _same(each)}\n",
        "    return {}\n",
        "tests/preflight/test_evaluation.py::test_what_is_gathered_until_the_end_of_an_epoch_is_refused_where_it_is_monitored",
    ),
    fault(
        "a metric's name that hides a number",
        "preflight/recording/logged.py",
        'f"{name} (metric)" if name in self.numbers else name',
        "name",
        "tests/preflight/test_evaluation.py::test_a_number_is_not_hidden_by_a_metric_of_its_name_nor_by_how_it_is_logged",
    ),
    fault(
        "what a step keeps in attributes, not compared",
        "preflight/trial.py",
        "                found.attributes(self.module)\n                found.metrics",
        "                found.metrics",
        "tests/preflight/test_training_numbers.py::test_what_a_step_keeps_of_a_shard_is_named_in_a_warning[2-{'ulysses_size': 2}]",
    ),
    fault(
        "a hook that changes the batch, not tried",
        "trainer/batch_hooks.py",
        "        return tried_training_step if same else partial(_after_hooks, batch_idx)\n",
        "        return tried_training_step\n",
        STOPPED,
    ),
    fault(
        "optimizers not tried on shards",
        "trainer/optimizer_trial.py",
        "    if type(optimizer) in ELEMENTWISE:\n",
        "    if True:\n",
        "tests/trainer/test_optimizers.py::test_the_reason_is_said",
    ),
    fault(
        "an optimizer that cannot be tried, without a word",
        "trainer/optimizer_trial.py",
        "            return Verdict(untried=_first_line(error))\n",
        "            return Verdict()\n",
        "tests/trainer/test_optimizers.py::test_one_that_cannot_be_tried_is_said_to_be_so",
    ),
    fault(
        "a whole step whose states stay whole",
        "trainer/whole_steps.py",
        "self._rename_states(parameters, sharded_like)",
        "self._rename_states(parameters, lambda value, _: value)",
        "tests/trainer/test_optimizers.py::test_a_fit_is_one_devices[2]",
    ),
    fault(
        "a closure of a whole step that runs on the weights of before",
        "trainer/whole_steps.py",
        "            parameter.to_local().copy_(sharded_like(whole, parameter).to_local())  # type: ignore[attr-defined]\n",
        "            if self._optimizer.state.get(parameter) is None:\n                continue\n",
        "tests/trainer/test_optimizers.py::test_a_fit_is_one_devices[2]",
    ),
    fault(
        "a later trial that ends the run where it cannot run",
        "preflight/first_batch.py",
        '    except TrialFailedError as error:\n        rank_zero_info(f"preflight: not compared after',
        '    except ZeroDivisionError as error:\n        rank_zero_info(f"preflight: not compared after',
        f"{PREFLIGHT_TEST}::test_where_nothing_can_be_compared_it_says_so",
    ),
    fault(
        "branches behind weights that begin at zero, not tried",
        "preflight/hidden_branches.py",
        "            local.copy_(torch.randn(local.shape, generator=generator) * scale)\n",
        "            pass\n",
        STOPPED,
    ),
    fault(
        "small numbers that stay in weights that began at zero",
        "preflight/hidden_branches.py",
        "            _local(weight).zero_()\n",
        "            pass\n",
        f"{PREFLIGHT_TEST}::test_weights_that_begin_at_zero_are_zero_afterwards",
    ),
    fault(
        "a longer crop whose pieces are cut otherwise than the sequence's",
        "preflight/crops/crop.py",
        "        piece = most - (most - whole // multiple) % modulus\n",
        "        piece = most - most % modulus\n",
        "tests/preflight/crops/test_longer_crop.py::test_its_pieces_leave_the_rest_of_the_sequences[2052-2x1]",
    ),
    fault(
        "one length tried alone",
        "preflight/first_batch.py",
        "        if longer.tokens > crop.tokens and longer.num_targets != 0:\n",
        "        if False:\n",
        STOPPED,
    ),
    fault(
        "a first step tried alone",
        "preflight/first_batch.py",
        "AGAIN = (3, 10, 100, 1_000, 10_000)",
        "AGAIN = ()",
        STOPPED,
    ),
    fault(
        "a manual step of which the last gradients alone are compared",
        "trainer/manual_optimization.py",
        "        for parameter, gradient in self._taken.items():\n            parameter.grad = gradient\n",
        "        pass\n",
        STOPPED,
    ),
    fault(
        "weights that a trial has moved",
        "step/isolation.py",
        "    _shard(parameter).copy_(before)\n",
        "    pass\n",
        f"{PREFLIGHT_TEST}::test_no_trace[1]",
    ),
    fault(
        "a target network's step, lost with the whole weights",
        "parallelize/fsdp/root_unit.py",
        "    shard.copy_(whole[rank * rows : rank * rows + len(shard)])\n",
        "    pass\n",
        "tests/flows/test_flows.py::test_the_page_is_true_of_a_flow[target_network]",
    ),
    fault(
        "gradients of a backward inside a step, not added up over the ranks",
        "parallelize/fsdp/root_unit.py",
        "        prepared: Tensor = state._register_pre_backward_hook(loss)\n",
        "        prepared = loss\n",
        "tests/flows/test_flows.py::test_the_page_is_true_of_a_flow[adversarial]",
    ),
    fault(
        "a rank's own term of a norm",
        "parallelize/fsdp/sharded_tensors.py",
        "    whole = tensor.to_local() if all(each.is_replicate() for each in tensor.placements) else tensor.full_tensor()\n",
        "    whole = tensor.to_local()\n",
        "tests/parallelize/fsdp/test_sharded_tensors.py::test_a_number_is_the_wholes",
    ),
    fault(
        "assigned data that FSDP2 does not gather",
        "parallelize/fsdp/sharded_tensors.py",
        "            shard.reset_sharded_param()\n",
        "            pass\n",
        "tests/parallelize/fsdp/test_sharded_tensors.py::test_assigned_data_is_what_the_forward_uses",
    ),
)
