"""Faults of layers that are split over ranks: gradients in part, biases that count twice, tokens and samples that do."""

from __future__ import annotations

from tests.faults.fault import fault

TESTS = "tests/parallelize/tensor_parallel"

TENSOR_PARALLEL = (
    fault(
        "weights of other shapes that are brought to one placement to be compared",
        "parallelize/fsdp/dtensor/plain_operands.py",
        "            return _equal(*args)\n",
        "            pass\n",
        "tests/trainer/optimizers/test_finetuning.py::test_a_split_layer_thaws_as_on_one_device",
    ),
    fault(
        "gradients of a split layer's input in part",
        "comm/tensor_parallel.py",
        "        return reduce_sum(grad_outputs[0].contiguous(), ctx.group), None\n",
        "        return grad_outputs[0], None\n",
        f"{TESTS}/test_law.py::test_two_ranks_with_half_of_each_layer_train_as_one",
    ),
    fault(
        "a bias added by each rank",
        "parallelize/tensor_parallel/layers.py",
        "    return out if bias is None else out + bias.to(out.dtype)\n",
        "    return out if bias is None else out + 2 * bias.to(out.dtype)\n",
        f"{TESTS}/test_law.py::test_models_of_other_forms[parallel]",
    ),
    fault(
        "causes of a loss that ranks make of their parts of a weight, in layers that are split",
        "preflight/run.py",
        "trial.may_retry or of_weights",
        "trial.may_retry",
        f"{TESTS}/test_refusals.py::test_what_is_refused_names_its_numbers[a penalty behind the model]",
    ),
    fault(
        "a reference run with split layers",
        "preflight/trial.py",
        "        with_whole_weights(module),\n",
        "",
        f"{TESTS}/test_refusals.py::test_what_is_refused_names_its_numbers[forgotten norms]",
    ),
    fault(
        "dropout between split layers",
        "rewrite/row_dropout.py",
        '        refuse_split_dropout(self.context, f"dropout {p}")\n',
        "",
        f"{TESTS}/test_refusals.py::test_what_is_refused_names_its_numbers[dropout]",
    ),
    fault(
        "tokens counted by each rank that splits weights",
        "mesh.py",
        "        tokens = None if tensor == 1 else make_token_group(base.size(), tensor)\n",
        "        tokens = None\n",
        f"{TESTS}/test_counts.py::test_sums_metrics_and_losses_over_rows_are_those_of_one_process",
    ),
    fault(
        "a stream read by each rank that splits weights",
        "trainer/sharded_model.py",
        "            sequence_group=self._groups.samples,\n",
        "            sequence_group=self._groups.sequence,\n",
        f"{TESTS}/test_counts.py::test_a_stream_without_a_seed_is_read_by_one_rank_of_all_that_share_its_samples",
    ),
    fault(
        "gradients of a split head's input in part",
        "weights/vocabulary_part.py",
        "        return comm.copy_to_ranks(whole, self.group)\n",
        "        return whole\n",
        f"{TESTS}/test_law.py::test_tables_and_heads_of_which_each_rank_has_its_words[words-layout0]",
        "tests/loss/output_head/test_part_functions.py::test_losses_of_all_kinds_are_those_of_whole_logits[2]",
    ),
    fault(
        "a target that each rank takes for a word of its own",
        "loss/output_head/chunked_head.py",
        "            counted = counted & is_here\n",
        "",
        "tests/loss/output_head/test_part_functions.py::test_losses_of_all_kinds_are_those_of_whole_logits[2]",
    ),
    fault(
        "exponents over each rank's own largest logit",
        "loss/output_head/chunked_head.py",
        "            largest = self.part.largest(largest)\n",
        "            pass\n",
        "tests/loss/output_head/test_part_functions.py::test_losses_of_all_kinds_are_those_of_whole_logits[2]",
    ),
    fault(
        "padding of a split table at its number on every rank",
        "parallelize/tensor_parallel/vocabulary.py",
        "        padding = None if table.padding_idx is None else table.padding_idx - self._part.first\n",
        "        padding = table.padding_idx\n",
        f"{TESTS}/test_law.py::test_tables_and_heads_of_which_each_rank_has_its_words[gemma2 words-layout8]",
    ),
    fault(
        "a whole head's logits gathered for a loss",
        "loss/output_head/deferred_heads.py",
        '    is_plain = is_plain and ("forward" not in vars(head) or vocabulary_part(head) is not None)\n',
        '    is_plain = is_plain and "forward" not in vars(head)\n',
        f"{TESTS}/test_law.py::test_no_rank_has_a_whole_table_head_or_logits",
    ),
    fault(
        "rows of a part that go to another rank",
        "comm/tensor_parallel.py",
        "            start, end = first + user * rows // size, first + (user + 1) * rows // size\n",
        "            start, end = first + (size - 1 - user) * rows // size, first + (size - user) * rows // size\n",
        f"{TESTS}/test_law.py::test_each_rank_has_its_share_of_each_part_and_keeps_no_copy_of_it",
    ),
    fault(
        "gradients of a packed weight in the order of the call",
        "parallelize/tensor_parallel/packed.py",
        "            of_weight = comm.from_parts(made if outputs == 0 else made.mT, outputs, parts, group).to(weight.dtype)\n",
        "            of_weight = (made if outputs == 0 else made.mT).to(weight.dtype)\n",
        f"{TESTS}/test_law.py::test_models_of_other_forms[packed]",
    ),
    fault(
        "parts that are taken for halves without a trial",
        "parallelize/tensor_parallel/packed_trial.py",
        "    return bool((torch.cat(of_ranks, -1) - whole).abs().max() <= _ROUNDING * whole.abs().max())\n",
        "    return True\n",
        f"{TESTS}/test_plan.py::test_a_plan_that_a_trial_contradicts_is_refused[mixed]",
    ),
    fault(
        "a rank's numbers of heads in a reference run",
        "parallelize/tensor_parallel/layers.py",
        "        if state.whole:\n            return run(*args, **kwargs)\n        values",
        "        values",
        f"{TESTS}/test_law.py::test_models_of_other_forms[packed]",
    ),
    fault(
        "random states of another number of ranks",
        "step/resume/random_streams.py",
        '        **({"tensor_parallel_size": tensor} if tensor > 1 else {}),\n',
        "",
        f"{TESTS}/test_checkpoints.py::test_a_run_goes_on_with_split_layers[uneven-True]",
    ),
)
