"""Faults of what trades memory for time: units of FSDP, activations that leave, and what is computed again."""

from __future__ import annotations

from tests.faults.fault import fault

UNITS = "tests/parallelize/fsdp/units/test_vocabulary_units.py"
OPTIONS = "tests/parallelize/fsdp/test_sharding_options.py"
GATHERS = "tests/parallelize/fsdp/test_gather_dtypes.py"
OFFLOAD = "tests/parallelize/test_activation_offload.py"
ONCE = f"{UNITS}::test_gradients_are_one_process_and_a_head_is_gathered_and_reduced_once"

FLOAT8 = "tests/trainer/test_float8.py"
BYTES = "tests/parallelize/memory/test_activation_bytes.py"
CHECKPOINTS = "tests/parallelize/test_activation_checkpointing.py"
BUDGETS = "tests/parallelize/test_compiled_budgets.py"
STAGED = "tests/rewrite/test_staged_heads.py"
STAGED_LAW = f"{STAGED}::test_every_gradient_is_that_of_one_process"

IN_BACKWARD = "tests/trainer/test_optimizer_in_backward.py"
IN_BACKWARD_LAW = f"{IN_BACKWARD}::test_a_fit_is_to_the_bit_that_of_steps_behind_the_backward[2]"

MEMORY = (
    fault(
        "a graph for each block, whose number is guarded",
        "parallelize/activation_checkpointing.py",
        "    how = block.how\n",
        "    how = checkpoints.of_block[block.number]\n",
        f"{CHECKPOINTS}::test_compiled_blocks_of_a_kind_share_one_graph[none]",
    ),
    fault(
        "a unit that is stepped in the backward of the first of its calls",
        "parallelize/fsdp/unused_parameters.py",
        "if self._calls[number] == 0:  # below it",
        "if True:  # below it",
        IN_BACKWARD_LAW,
    ),
    fault(
        "gradients that a reentrant checkpoint leaves where nobody adds them up",
        "step/runner.py",
        "            used.check_reduced()\n",
        "            pass\n",
        f"{IN_BACKWARD}::test_a_reentrant_checkpoint_of_what_runs_twice_is_refused",
    ),
    fault(
        "weights that no rank used, stepped by zeros",
        "trainer/optimizers/optimizer_in_backward.py",
        "self._step_and_free({each for each, now in used.items() if now})",
        "self._step_and_free({each for each, now in used.items()})",
        IN_BACKWARD_LAW,
    ),
    fault(
        "gradients that are kept when a unit is stepped",
        "trainer/optimizers/optimizer_in_backward.py",
        "                each.grad = None\n",
        "                pass\n",
        IN_BACKWARD_LAW,
    ),
    fault(
        "a step in the backward of a loss that is to be explained",
        "strategy.py",
        "return not self._steps.is_to_explain",
        "return True",
        f"{IN_BACKWARD}::test_a_loss_that_is_not_finite_is_explained_with_the_weights_that_made_it",
    ),
    fault(
        "the gradient of a stage's rows laid where another stage's are",
        "rewrite/staged_heads/gradients.py",
        "laid[heads.rows(own, stage)] = grad",
        "laid[heads.rows(own, 0)] = grad",
        f"{STAGED_LAW}[2]",
    ),
    fault(
        "stages whose first gradient of x is the only one",
        "rewrite/staged_heads/gradients.py",
        "into.addmm_(grad, weight)",
        "into.copy_(grad @ weight)",
        f"{STAGED_LAW}[2]",
    ),
    fault(
        "the bias of a projection that is another stage's",
        "rewrite/staged_heads/module.py",
        "else projection.bias[rows]",
        "else projection.bias[: rows.stop - rows.start]",
        f"{STAGED_LAW}[2]",
    ),
    fault(
        "rows that are taken for heads and are none",
        "rewrite/staged_heads/stages.py",
        "if differs != [head < allowed for head in range(len(differs))]:",
        "if False:",
        f"{STAGED}::test_what_cannot_be_staged_is_refused_by_name_on_all_ranks",
    ),
    fault(
        "a checkpoint policy that runs the stages again",
        "attention/staged.py",
        "torch.ops.lightning_sp.staged_attention.default)",
        "torch.ops.lightning_sp.attention.default)",
        f"{STAGED}::test_what_is_sent_is_the_formula_and_no_kernel_runs_again_for_the_backward[selective-1]",
    ),
    fault(
        "a hook that sees some heads alone",
        "rewrite/staged_heads/stages.py",
        'if not where.startswith("lightning_sp."):',
        "if False:",
        f"{STAGED}::test_what_cannot_be_staged_is_refused_by_name_on_all_ranks",
    ),
    fault(
        "a head that is reduced before its last part has its gradient, or for each part",
        "parallelize/fsdp/unused_parameters.py",
        "if number in self._heads and self._calls[number] > 1 and not self._ending:",
        "if False:",
        f"{ONCE}[chunked]",
    ),
    fault(
        "a unit of a layer whose weight is used without a call",
        "parallelize/fsdp/units/vocabulary_units.py",
        "is_only_called(root, layer)",
        "True",
        f"{ONCE}[direct]",
        f"{ONCE}[handed]",
    ),
    fault(
        "a unit whose output loses its hooks when it is written to",
        "parallelize/fsdp/shard_model.py",
        "        own_outputs(unit)\n",
        "",
        f"{ONCE}[masked]",
    ),
    fault(
        "a head that is whole through an update by hand, with the weights from before",
        "parallelize/fsdp/units/root_unit.py",
        "for unit in fsdp_modules(self._root)[1:]:  # what stays",
        "for unit in fsdp_modules(self._root)[:0]:  # what stays",
        "tests/trainer/test_memory_options.py::test_units_that_stay_whole_have_the_weights_after_an_update_by_hand",
    ),
    fault(
        "a weight that something reads gathered in bfloat16",
        "parallelize/fsdp/gather_dtypes.py",
        "weight.rounded = not other",
        "weight.rounded = True",
        f"{GATHERS}::test_losses_and_gradients_are_bit_by_bit_those_of_float32_gathers[2]",
    ),
    fault(
        "rounded numbers read as those of float32",
        "weights/autocast.py",
        "if self.numbers.dtype != self.dtype:",
        "if False:",
        f"{GATHERS}::test_a_weight_that_is_read_later_is_refused_by_name",
    ),
    fault(
        "a leaf that is in a graph replaced, and its gradient lost",
        "parallelize/fsdp/gather_dtypes.py",
        "self._is_plain = not self._notes and torch.is_grad_enabled()",
        "self._is_plain = False",
        f"{GATHERS}::test_no_bit_changes_however_weights_are_used[first in float32]",
    ),
    fault(
        "a backward without the float32 numbers that its forward saved",
        "parallelize/fsdp/gather_dtypes.py",
        "return not self._needs_float32",
        "return True",
        f"{GATHERS}::test_no_bit_changes_however_weights_are_used[separate, later partly]",
    ),
    fault(
        "every weight gathered in float32 under autocast",
        "parallelize/fsdp/gather_dtypes.py",
        "ROUNDED if casts and self.rounded else None",
        "None",
        f"{GATHERS}::test_a_gather_sends_half_the_bytes_of_these_weights",
    ),
    fault(
        "gradients that are summed in their own dtype whatever is asked for",
        "parallelize/fsdp/shard_model.py",
        'if options.gradient_dtype != "auto":',
        "if False:",
        f"{OPTIONS}::test_gradients_are_summed_in_the_dtype_that_is_given[bfloat16-float32-3]",
    ),
    fault(
        "the place of an activation given to the next one while it is needed",
        "parallelize/activation_offload/disk.py",
        "place, self._end = self._end, self._end + num_bytes",
        "place, self._end = self._end, max(self._end, num_bytes)",
        f"{OFFLOAD}::test_gradients_are_bitwise_equal_and_a_horizon_is_in_memory[1-]",
    ),
    fault(
        "every input of a block brought back at once",
        "parallelize/activation_offload/horizon.py",
        "[: self.horizon - 1]",
        "",
        f"{OFFLOAD}::test_gradients_are_bitwise_equal_and_a_horizon_is_in_memory[2-]",
    ),
    fault(
        "inputs that leave while the block that made them has long gone on",
        "parallelize/activation_offload/horizon.py",
        "while len(self._leaving) > self.horizon - 1:",
        "while False:",
        f"{OFFLOAD}::test_at_most_a_horizon_of_inputs_is_on_its_way_out[3]",
    ),
    fault(
        "a budget compared to the shortest rank's peak",
        "step/auto_checkpointing.py",
        "numbers = [-budget, batch.local_tokens, ",
        "numbers = [-budget, 1, ",
        "tests/step/test_auto_checkpointing.py::test_a_longer_batch_recomputes_and_a_line_says_so",
    ),
    fault(
        "tiles that auto chose and nothing switches on",
        "parallelize/activation_checkpointing.py",
        "self.tiles.use(policy in TILED)",
        "self.tiles.use(False)",
        f"{BYTES}::test_what_is_alive_in_a_step_is_no_more_than_predicted_and_not_far_from_it[full_tiled]",
    ),
    fault(
        "inputs that leave counted as all in memory",
        "parallelize/memory/memory_prediction.py",
        "[: step.horizon]",
        "[:]",
        "tests/parallelize/memory/test_memory_prediction.py::test_where_inputs_leave_a_horizon_of_the_largest_is_in_memory",
    ),
    fault(
        "a longer batch that is not looked at",
        "data/batch/collective_shard.py",
        "info.local_tokens > most_tokens",
        "info.local_tokens > most_tokens > 0",
        "tests/step/test_auto_checkpointing.py::test_a_given_budget_that_nothing_fits_is_refused_on_all_ranks_alike",
    ),
    fault(
        "casts of weights counted for each token",
        "parallelize/memory/weight_casts.py",
        "if func is _CAST:",
        "if False:",
        f"{BYTES}::test_a_token_of_a_llamas_block_leaves_as_much_in_a_crop_as_in_a_step[False]",
        f"{BYTES}::test_a_token_of_a_llamas_block_leaves_as_much_in_a_crop_as_in_a_step[True]",
    ),
    fault(
        "each cast of a weight taken for its first",
        "parallelize/memory/weight_casts.py",
        "any(first < b and a < end for a, b in weight.parts)",
        "False",
        f"{BYTES}::test_a_cast_of_a_weight_is_known_by_its_memory[for_some_tokens-2048-14336]",
    ),
    fault(
        "delta of another head",
        "attention/schemes/stages.py",
        "delta[:, first - own[0] : end - own[0]]",
        "delta[:, : end - first]",
        "tests/attention/ranks/test_stages.py::test_law_in_stages[2-32]",
    ),
    fault(
        "delta from a gradient whose square is 0",
        "attention/kernels/out_gradient.py",
        "        unit = g / largest\n",
        "        unit, largest = g.to(delta.dtype), torch.ones_like(largest)\n",
        "tests/attention/kernels/test_out_gradient.py::test_the_product_is_that_of_out[50-dtype1]",
    ),
    fault(
        "full checkpointing that keeps the attention",
        "parallelize/activation_checkpointing.py",
        '    "matmuls": partial(',
        '    "full": partial(create_selective_checkpoint_contexts, _saves),\n    "matmuls": partial(',
        f"{CHECKPOINTS}::test_full_repeats_the_exchanges_of_a_forward",
    ),
    fault(
        "products that are computed twice, where their results were to be kept",
        "parallelize/activation_checkpointing.py",
        "    return CheckpointPolicy.MUST_SAVE if is_kept(operator, args) else _saves(context, operator)\n",
        "    return _saves(context, operator)\n",
        f"{CHECKPOINTS}::test_products_that_cost_more_than_their_bytes_are_computed_once",
    ),
    fault(
        "a product's result that is kept, and was written to",
        "parallelize/activation_checkpointing.py",
        "    if kept.is_written:\n",
        "    if False:\n",
        f"{CHECKPOINTS}::test_a_block_that_writes_to_a_products_result_is_refused_by_name",
    ),
    fault(
        "writes that are told by a count, which a view of linear's has not",
        "weights/matmuls.py",
        "self.storages and func._schema.is_mutable",
        "False",
        f"{CHECKPOINTS}::test_a_block_that_writes_to_a_products_result_is_refused_by_name",
    ),
    fault(
        "products that torch matches by their number alone, after one that is not run again",
        "weights/matmuls.py",
        "        if self._number >= len(self._calls) or self._calls[self._number] != (operator, shapes):\n",
        "        if False:\n",
        f"{CHECKPOINTS}::test_a_block_that_runs_other_products_when_it_is_recomputed_is_refused_by_name",
    ),
    fault(
        "a budget that the partitioner is not told",
        "global_view/compiled/saved.py",
        "activation_memory_budget=percent / 100",
        "activation_memory_budget=1.0",
        f"{BUDGETS}::test_what_is_dearest_for_its_bytes_is_kept_longest",
    ),
    fault(
        "random numbers that are drawn again, for their bytes are many",
        "global_view/compiled/saved.py",
        "    return torch.Tag.nondeterministic_seeded in operator.tags\n",
        "    return False\n",
        f"{BUDGETS}::test_what_is_random_is_kept_whatever_the_budget",
    ),
    fault(
        "an attention that a budget lets compute again",
        "parallelize/activation_checkpointing.py",
        "    saved = _saves(context, operator) is CheckpointPolicy.MUST_SAVE or is_random(operator)\n",
        "    saved = is_random(operator)\n",
        f"{BUDGETS}::test_ranks_train_as_without_and_repeat_neither_attention_nor_messages",
    ),
    fault(
        "budgets of blocks that no compiler of ours has",
        "parallelize/activation_checkpointing.py",
        "        return OF_COMPILED if self._backend else CANDIDATES\n",
        "        return OF_COMPILED\n",
        "tests/step/test_auto_checkpointing.py::test_a_longer_batch_recomputes_and_a_line_says_so",
    ),
    fault(
        "a model's own checkpointing beside the strategy's",
        "parallelize/activation_checkpointing.py",
        "        disable()  # type",
        "        disable  # type",
        f"{CHECKPOINTS}::test_a_models_own_checkpointing_is_taken_over[False-none-selective]",
    ),
    fault(
        "blocks whose own checkpointing is switched off keep all",
        "parallelize/activation_checkpointing.py",
        "self._asked |= {each.number for each in self._states if each.module in parts}",
        "self._asked |= {each.number for each in self._states if each.module not in parts}",
        f"{CHECKPOINTS}::test_a_models_own_checkpointing_is_taken_over[True-none-selective]",
    ),
    fault(
        "float8 by the largest of all tokens",
        "parallelize/float8.py",
        'RECIPE = "rowwise_with_gw_hp"',
        'RECIPE = "tensorwise"',
        f"{FLOAT8}::test_a_fit_is_that_of_the_library_on_one_device[ulysses]",
    ),
    fault(
        "a user's float8 layers that look along the sequence",
        "parallelize/float8.py",
        'cast.scaling_granularity.name != "AXISWISE"',
        "False",
        f"{FLOAT8}::test_a_recipe_that_looks_along_the_sequence_is_refused",
    ),
    fault(
        "float8 that is asked for and not made",
        "step/prepare.py",
        "    convert_to_float8(blocks, config.fp8)\n",
        "",
        f"{FLOAT8}::test_it_rounds",
    ),
    fault(
        "a single number that steps see with a dim",
        "parallelize/fsdp/parameters_without_dim.py",
        "torch.Size(()), ()",
        "torch.Size((1,)), (1,)",
        "tests/checkpoint/contents/test_single_numbers.py::test_a_folder_resumes_on_other_degrees_and_is_exported_in_its_own_shapes",
    ),
    fault(
        "a single number that is read outside of its module with a dim",
        "parallelize/fsdp/dtensor/outside_weights.py",
        "    return in_own_shape(WeightShard(_local_of(value), value._spec).whole(), value)\n",
        "    return WeightShard(_local_of(value), value._spec).whole()\n",
        "tests/flows/test_flows.py::test_the_page_is_true_of_a_flow[single_numbers]",
    ),
)
