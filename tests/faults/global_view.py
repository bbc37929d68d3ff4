"""Faults of tensors that show whole sequences."""

from __future__ import annotations

from tests.faults.fault import fault

RULES = "tests/global_view/test_rules.py::test_a_rule_is_exact_forward_and_backward"
REFUSED = "tests/global_view/test_rules.py::test_what_has_no_rule_is_refused_with_the_users_line"
TRAINING = "tests/global_view/test_training.py"
AUTO = "tests/global_view/test_auto.py"
COMPILED = "tests/global_view/test_compiled.py"
DEFERRED = "tests/global_view/test_deferred.py::test_losses_and_gradients_are_those_of_logits_that_are_made[1-2]"

GLOBAL_VIEW = (
    fault(
        "lines whose tokens lie in the order of the ranks",
        "global_view/lines.py",
        "    whole = storage.merged(list(parts.unbind(0)), 1).narrow(1, 0, own.length)\n",
        "    whole = torch.cat(list(parts.unbind(0)), 1).narrow(1, 0, own.length)\n",
        f"{RULES}[1-2-16]",
    ),
    fault(
        "strided convolutions that share the plan of others",
        "global_view/rules/convolutions.py",
        'key = ("conv", strides[at], paddings[at], dilations[at])',
        'key = ("conv",)',
        f"{RULES}[1-2-16]",
    ),
    fault(
        "padding that is added up in a whole tensor",
        "global_view/rules/into_whole.py",
        "values = source.placement.without_padding(source.local.to(into.dtype), 0)",
        "values = source.local.to(into.dtype)",
        f"{RULES}[2-1-13]",
    ),
    fault(
        "a batch norm of this rank's tokens alone",
        "global_view/rules/norms.py",
        "    middle = mean(x, list(dims), True)\n",
        "    middle = x.local.mean(list(dims), keepdim=True)\n",
        f"{RULES}[1-2-16]",
    ),
    fault(
        "joined rows taken for tokens in their order",
        "global_view/movement.py",
        "shown = (ahead * own.length + token) * own.inner + within",
        "shown = (token * own.outer + ahead) * own.inner + within",
        f"{RULES}[1-2-16]",
    ),
    fault(
        "a write by numbers that takes a rank's slots for positions",
        "global_view/rules/writing.py",
        "    mine = slot_of[position]\n",
        "    mine = torch.where(position < own.storage.local_tokens, position, -1)\n",
        f"{RULES}[1-2-16]",
    ),
    fault(
        "rows of a recurrent layer in the order of the states of other rows",
        "global_view/lines.py",
        ".narrow(0, storage.rank * count, count)",
        ".narrow(0, 0, count)",
        f"{RULES}[1-2-16]",
    ),
    fault(
        "hooks that have a batch twice",
        "preflight/tried_steps.py",
        "            self._undo_hooks()\n",
        "",
        f"{AUTO}::test_what_a_part_refuses_trains_as_on_one_device[mean_pooled-('turns',)]",
    ),
    fault(
        "a layer that stays toggled on",
        "parallelize/fsdp/root_unit.py",
        "                each._unsharded_param.requires_grad_(each.sharded_param.requires_grad)\n",
        "                pass\n",
        "tests/trainer/test_optimizers.py::test_layers_of_the_module_itself_are_toggled",
    ),
    fault(
        "added numbers that hide all keys of a query, computed",
        "rewrite/whole_attention.py",
        "queries.storage.agree(_NO_KEY if bool((bias.detach() <= HIDDEN_BELOW).all(-1).any()) else None)",
        "queries.storage.agree(None)",
        f"{REFUSED}[a bias that hides all keys-words8]",
    ),
    fault(
        "a maximum with what hides all keys, left out",
        "global_view/rules/scores.py",
        "    check_ties(x.attention)\n",
        "",
        f"{REFUSED}[a maximum with what hides all keys-words7]",
    ),
    fault(
        "a running sum that counts a rank's own run twice",
        "global_view/rules/scans.py",
        "is_ahead = (firsts[:, :, None] < begins)",
        "is_ahead = (firsts[:, :, None] <= begins)",
        f"{RULES}[1-2-16]",
    ),
    fault(
        "an expert's tokens taken from the first row",
        "global_view/rules/chosen.py",
        "slots = row[mine] * source.local_tokens + slot[token[mine]]",
        "slots = slot[token[mine]]",
        f"{RULES}[1-2-16]",
    ),
    fault(
        "scores that are made without their mask",
        "global_view/rules/made_scores.py",
        "        scores = scores.masked_fill(~visible, -math.inf)\n",
        "        pass\n",
        f"{RULES}[1-2-16]",
    ),
    fault(
        "a step that sees the batch of the view in which it was refused",
        "preflight/tried_steps.py",
        "            self._hand_again(whole, handed, hook, (batch_idx,))\n",
        "            pass\n",
        f"{AUTO}::test_what_a_part_refuses_trains_as_on_one_device[mean_pooled-('turns',)]",
    ),
    fault(
        "a batch handed again without what hooks had changed",
        "preflight/tried_steps.py",
        "self._handed.replace(handed, self._handed.after_hooks(self, hook, shown, indices))",
        "self._handed.replace(handed, shown)",
        f"{AUTO}::test_what_a_part_refuses_trains_as_on_one_device[mean_pooled-('turns',)]",
    ),
    fault(
        "a whole batch marked as sharded by an entry without the sequence",
        "data/batch/sharded_batch.py",
        "if isinstance(value, Tensor) and id(value) not in given:",
        "if isinstance(value, Tensor):",
        f"{AUTO}::test_what_a_part_refuses_trains_as_on_one_device[shifted_logits-('tuple',)]",
    ),
    fault(
        "documents that attention by hand crosses without a word",
        "rewrite/whole_attention.py",
        "if not documents and queries.storage.sequence.documents_declared:",
        "if False:",
        f"{AUTO}::test_declared_documents_are_not_attended_across",
    ),
    fault(
        "a whole tensor cut as if shards were contiguous",
        "global_view/placement.py",
        "index = storage.positions(whole.device).clamp(max=placement.length - 1)",
        "index = (storage.rank * storage.local_tokens + torch.arange(storage.local_tokens)).clamp(max=placement.length - 1)",
        f"{RULES}[1-2-16]",
    ),
    fault(
        "padding that counts in a sum over the sequence",
        "global_view/rules/along_sequence.py",
        "return summed(x.placement.without_padding(x.local, 0).sum(dims, keepdim=keeps, dtype=dtype), x)",
        "return summed(x.local.sum(dims, keepdim=keeps, dtype=dtype), x)",
        f"{RULES}[2-1-13]",
    ),
    fault(
        "a mean over the sequence that divides by a rank's tokens",
        "global_view/rules/along_sequence.py",
        "return math.prod(x.shape[dim] for dim in dims)",
        "return math.prod(x.local.shape[dim] for dim in dims)",
        f"{RULES}[1-2-16]",
    ),
    fault(
        "a bias that is lost behind a mask",
        "global_view/rules/scores.py",
        "return x.changed(bias=bias if known.bias is None else known.bias + bias)",
        "return x.changed(bias=bias if known.bias is None and known.visible is None else known.bias)",
        f"{RULES}[1-2-16]",
    ),
    fault(
        "FSDP2's hook is given tensors without memory",
        "step/prepare.py",
        "        hide_from_fsdp(module)\n",
        "        pass\n",
        f"{TRAINING}::test_weights_and_losses_are_those_of_one_device[2-options0-losses0]",
    ),
    fault(
        "whole numbers that each rank draws for itself",
        "step/runner.py",
        "            seed = batch.seed if self.context.trial_seed is None else self.context.trial_seed\n            self._of_whole_rows"
        ".enter_context(streams_from(seed, self.device))\n",
        "            pass\n",
        f"{TRAINING}::test_whole_numbers_are_drawn_alike_and_those_of_tokens_are_not",
    ),
    fault(
        "ranks that drop alike tokens that are not",
        "step/runner.py",
        "return streams_from(mixed_seed(begin, self.context.run_mesh.sequence_rank), self.device)",
        "return streams_from(mixed_seed(begin), self.device)",
        f"{TRAINING}::test_whole_numbers_are_drawn_alike_and_those_of_tokens_are_not",
    ),
    fault(
        "a mask that is causal in its first and last row, taken for causal",
        "global_view/bands.py",
        "        if found is None or not bool((found == expected).all()):\n",
        "        if found is None:\n",
        "tests/global_view/test_bands.py::test_another_mask_stays_a_matrix[one key hidden]",
    ),
    fault(
        "a fill of logits put among their hidden states",
        "global_view/movement.py",
        "take(made(x.local)) if bool((index < 0).any()) else by_source(x.local, take)",
        "by_source(x.local, take)",
        DEFERRED,
    ),
    fault(
        "logits that were written to, turned around as they were before",
        "loss/deferred_logits.py",
        "return None if self.is_final or self.class_dim != -1 else self.hidden",
        "return None if self.class_dim != -1 else self.hidden",
        DEFERRED,
    ),
    fault(
        "a slice of detached logits with a graph of the head",
        "loss/deferred_logits.py",
        "        link = Link(self, None, False)\n",
        "        link = None\n",
        DEFERRED,
    ),
    fault(
        "some words of chosen tokens taken from their hidden states",
        "global_view/rules/indexing.py",
        "by_source(x.local, take) if _is_full(index[-1]) else take(made(x.local))",
        "by_source(x.local, take)",
        DEFERRED,
    ),
    fault(
        "a mask that a graph writes into, known as it was before",
        "global_view/compiled/known_masks.py",
        "if _writes(node) and any(each in found for each in reads):",
        "if False:",
        f"{COMPILED}::test_a_rule_is_exact_where_it_is_compiled[1-2-16-names0]",
    ),
    fault(
        "a slice that leaves a graph as long as what it was taken from",
        "global_view/compiled/local_graph.py",
        "length = sequences[known.like].placement.length + known.longer",
        "length = sequences[known.like].placement.length",
        f"{COMPILED}::test_a_rule_is_exact_where_it_is_compiled[1-2-16-names0]",
    ),
    fault(
        "a graph for each length of a mask that is a band",
        "global_view/compiled/known_masks.py",
        "band, is_hidden = band_of(~mask), True",
        "is_hidden = True",
        f"{COMPILED}::test_a_second_length_is_not_compiled_again[1-2]",
    ),
)
