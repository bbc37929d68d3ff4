"""Faults of the loss and its gradient."""

from __future__ import annotations

from tests.faults.fault import FITS, LOSSES, REWRITTEN, fault

_COUNTED = "tests/trainer/batches/test_counts_of_groups.py::test_each_group_counts_by_what_it_divides_by[2-strategy0-kinds0-12-True-1]"
_CHUNKS, _WAITING = "tests/loss/output_head/test_chunked_head.py", "tests/loss/output_head/test_deferred_heads.py"
_OWN_LABELS = "tests/rewrite/hugging_face/losses/test_own_labels.py"

LOSS = (
    fault(
        "a gradient of the package's own that a mode hands to a user's",
        "context/own_gradients.py",
        "    with torch._C.DisableTorchFunction():\n        return _GRAD(*args, **kwargs)\n",
        "    return _GRAD(*args, **kwargs)\n",
        "tests/context/test_own_gradients.py::test_a_mode_hands_them_to_nobody",
    ),
    fault(
        "a model's own loss of the batch's labels, whatever the step hands over",
        "rewrite/hugging_face/losses/loss.py",
        '    return targets_of(context, given["labels"], given["logits"].device)\n',
        "    return context.step.batch.shift_labels\n",
        f"{_OWN_LABELS}::test_each_is_that_of_one_device[every kind-ring]",
    ),
    fault(
        "likewise where no sequence is split",
        "rewrite/hugging_face/losses/given_labels.py",
        '    return None if given is batch.shift_labels and "shift_labels" not in batch.names else given\n',
        "    return given\n",
        f"{_OWN_LABELS}::test_each_is_that_of_one_device[every kind-groups]",
    ),
    fault(
        "likewise in a model that shifts them by its mask",
        "rewrite/hugging_face/losses/own_shift.py",
        "        targets = targets_of(context, labels, output[0].device)\n",
        "        targets = step.batch.shift_labels\n",
        f"{_OWN_LABELS}::test_each_is_that_of_one_device[audio-ring]",
    ),
    fault(
        "a decoder's inputs of the batch's labels, whatever the step hands over",
        "rewrite/hugging_face/positions/position_ids.py",
        "            kwargs = others | found\n",
        "            kwargs = found | kwargs\n",
        f"{_OWN_LABELS}::test_each_is_that_of_one_device[decoder-ring]",
    ),
    fault(
        "a loss of two rows taken for one of a row, by its number of targets",
        "loss/targets.py",
        '    return "row" if is_row and batch.rows > 1 else "tokens"\n',
        '    return "row" if count in {each.length // 2 for each in batch.all_sequences} else "tokens"\n',
        "tests/loss/test_targets.py::test_the_tensor_tells_what_its_targets_are_of[8-of0-tokens]",
    ),
    fault(
        "ignored tokens in the gradient of a loss in chunks",
        "loss/output_head/chunked_head.py",
        "exponents.mul_(sums.reciprocal().masked_fill(ignored, 0))",
        "exponents.mul_(sums.reciprocal())",
        f"{_CHUNKS}::test_sums_and_losses_of_tokens_are_those_of_the_logits[5-tokens]",
    ),
    fault(
        "a second backward scaled by the first one's factor too",
        "loss/output_head/chunked_head.py",
        "        once = not torch._C._autograd._get_current_graph_task_keep_graph()\n",
        "        once = True\n",
        f"{_CHUNKS}::test_a_second_backward_finds_the_same_and_one_of_second_order_is_refused",
    ),
    fault(
        "logits made of weights that FSDP has freed",
        "loss/output_head/deferred_heads.py",
        "                if call.weight in weights:\n",
        "                if False:\n",
        f"{_WAITING}::test_losses_and_gradients_are_those_of_logits_that_are_made[most]",
    ),
    fault(
        "logits read behind a step made of the weights that it has left",
        "loss/output_head/deferred_heads.py",
        "            if call.weight is head.weight and call.is_held:\n",
        "            if False:\n",
        "tests/loss/output_head/test_later_logits.py::"
        "test_logits_read_behind_a_backward_and_a_step_are_those_of_before[part]",
    ),
    fault(
        "a hook's whole number of the global view counted for each rank",
        "trainer/logged_numbers/logged_sums.py",
        "        once = is_whole or bool(",
        "        once = bool(",
        "tests/trainer/logged_numbers/test_logged_sums.py::"
        "test_in_the_global_view_what_ranks_have_alike_is_theirs_together",
    ),
    fault(
        "logits that a view wrote to, read as they were before",
        "loss/output_head/deferred_logits.py",
        "            call.share_memory()\n",
        "            pass\n",
        "tests/loss/output_head/test_written_logits.py::test_a_step_is_that_of_real_logits[view_of_part]",
    ),
    fault(
        "a loss over chunks although somebody waits for the gradient of the logits",
        "loss/output_head/deferred_logits.py",
        "            each.call.is_final = True\n",
        "            pass\n",
        "tests/loss/output_head/test_written_logits.py::test_a_step_is_that_of_real_logits[hook_before]",
    ),
    fault(
        "logits that a step leaves, asked of later weights",
        "loss/output_head/head_call.py",
        "                logits.make()\n        self.is_final = True\n",
        "                logits.make()\n",
        f"{_WAITING}::test_losses_and_gradients_are_those_of_logits_that_are_made[most]",
    ),
    fault(
        "labels shifted after sharding",
        "rewrite/hugging_face/losses/given_labels.py",
        "    return shard(padded, batch.layout, context.mesh.sequence_rank, dim=1)\n",
        "    return shift_labels(labels.to(device))\n",
        REWRITTEN,
    ),
    fault(
        "the target at each shard's edge dropped",
        "data/batch/shard_sequence.py",
        "        return shard(filled(tensor, padded, dim=dim), layout, rank, dim=dim)\n",
        "        part = shard(filled(tensor, padded, dim=dim), layout, rank, dim=dim).clone()\n"
        "        if name in ('shift_labels', 'targets') and layout.size > 1:\n"
        "            part[:, -1] = -100\n"
        "        return part\n",
        f"{FITS}[2]",
    ),
    fault(
        "labels shifted inside the model, on a shard",
        "loss/targets.py",
        "if size > 1 and count == rows * (local - 1) and local > 1 and not pooled:",
        "if False:",
        "tests/loss/test_loss.py::test_a_loss_that_is_no_mean_over_tokens_is_refused",
    ),
    fault(
        "a sum over all data-parallel groups, which a step divides by its own group's rows",
        "loss/interception.py",
        " and mesh.data_parallel_size > 1 and self.context.sums_over_groups\n",
        " and mesh.data_parallel_size > 1\n",
        "tests/loss/test_whole_sequences.py::test_hand_written_losses[2]",
    ),
    fault(
        "a mean over no target that is 0 in the logs",
        "loss/reduction.py",
        "    return torch.where(count == 0, torch.nan, total / nonzero_count(count))\n",
        "    return total / nonzero_count(count)\n",
        LOSSES,
    ),
    fault(
        "the mean of the ranks' means",
        "loss/interception.py",
        "        both = comm.sum_over_ranks(torch.stack([total, count]), step.summed_over if group is None else group)\n",
        "        both = torch.stack([mean_over(total, count), torch.ones_like(count)])\n"
        "        both = comm.sum_over_ranks(both, step.summed_over if group is None else group)\n",
        LOSSES,
    ),
    fault(
        "the mean of the ranks' means, of a sum that the step returns",
        "loss/reduction.py",
        "    both = comm.sum_over_ranks(torch.stack([total, count.to(total.dtype)]), group)\n",
        '    if reduction == "mean":\n'
        "        total, count = total / nonzero_count(count), torch.ones_like(count)\n"
        "    both = comm.sum_over_ranks(torch.stack([total, count.to(total.dtype)]), group)\n",
        LOSSES,
    ),
    fault(
        "the mean of the micro-batches' means",
        "strategy.py",
        "            closure_loss = self._weighed(closure_loss, step)\n",
        "            pass\n",
        LOSSES,
    ),
    fault(
        "gradients scaled by the group's size",
        "comm/collectives.py",
        "return reduce_sum(grad_outputs[0], ctx.group), None",
        "return grad_outputs[0], None",
        f"{FITS}[2]",
        "tests/comm/test_comm.py::test_the_mirror_of_a_sum_adds_up_the_ranks_cotangents",
    ),
    fault(
        "nan where all tokens of a rank are masked",
        "loss/reduction.py",
        "    return each.to(dtype).sum(), count.to(dtype)\n",
        "    return each.to(dtype).sum() / valid.sum() * valid.sum(), count.to(dtype)\n",
        LOSSES,
    ),
    fault(
        "nan where all tokens of all ranks are masked",
        "loss/reduction.py",
        "    return torch.where(count == 0, torch.ones_like(count), count)\n",
        "    return count\n",
        LOSSES,
    ),
    fault(
        "a sum over pictures counted once for each rank of their sequence",
        "context/step.py",
        "self.whole_step, self.mesh = step, replace(self.run_mesh, layout=SequenceLayout())",
        "self.whole_step = step",
        "tests/trainer/batches/test_whole_batches.py::test_weights_metrics_and_predictions_are_one_devices[sum]",
    ),
    fault(
        "pictures that each rank of a sequence drops otherwise",
        "step/runner.py",
        "        seed = batch.seed if self.context.run_mesh.layout.size > 1 else None\n",
        "        seed = None\n",
        "tests/trainer/batches/test_whole_batches.py::test_ranks_of_a_sequence_draw_alike_and_groups_and_steps_do_not",
    ),
    fault(
        "a cross entropy that is only looked at, and says how its micro-batch weighs",
        "loss/token_weighting.py",
        "    if not step.means:\n",
        "    if True:\n",
        "tests/loss/test_loss.py::test_raw_gradients_and_the_logged_loss_are_those_of_all_tokens[2]",
    ),
    fault(
        "no crop of which one group has fewer targets",
        "preflight/batches/shown_batches.py",
        "    context.counts_tried = True\n",
        "    return\n",
        _COUNTED,
    ),
    fault(
        "what a step adds to its counts, once for each group",
        "loss/counted_terms.py",
        "            added = added_to(terms, context.added, loss) / context.mesh.data_parallel_size\n",
        "            added = added_to(terms, context.added, loss)\n",
        _COUNTED,
    ),
    fault(
        "a group without a target that counts as its clamped divisor",
        "loss/counted_terms.py",
        "    return empty & by_one\n",
        "    return empty & ~empty & by_one\n",
        _COUNTED,
    ),
    fault(
        "terms by their groups' counts where the mean of rows' means is one device's",
        "preflight/differences/counted_groups.py",
        "    if max(far_otherwise, least) * _CLEARLY < far:\n",
        "    if True:\n",
        _COUNTED,
    ),
    fault(
        "what a group divides its loss by, of which no trial has told, without a word",
        "trainer/counted_groups.py",
        "        elif not by_counts and counts_differ(counts):\n",
        "        elif False:\n",
        "tests/trainer/batches/test_counts_of_groups.py::test_counts_that_no_trial_can_tell_of_are_named",
    ),
)
