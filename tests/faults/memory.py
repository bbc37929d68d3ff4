"""Faults of what trades memory for time: units of FSDP, and activations that leave."""

from __future__ import annotations

from tests.faults.fault import fault

UNITS = "tests/parallelize/fsdp/test_vocabulary_units.py"
OPTIONS = "tests/parallelize/fsdp/test_sharding_options.py"
OFFLOAD = "tests/parallelize/test_activation_offload.py"
ONCE = f"{UNITS}::test_gradients_are_one_process_and_a_head_is_gathered_and_reduced_once"

MEMORY = (
    fault(
        "a head that is reduced before its last part has its gradient, or for each part",
        "parallelize/fsdp/unused_parameters.py",
        "if self._calls.get(number, 0) > 1 and not self._ending:",
        "if False:",
        f"{ONCE}[chunked]",
    ),
    fault(
        "a unit of a layer whose weight is used without a call",
        "parallelize/fsdp/vocabulary_units.py",
        "is_only_called(root, layer)",
        "True",
        f"{ONCE}[direct]",
        f"{ONCE}[handed]",
    ),
    fault(
        "a head that is whole through an update by hand, with the weights from before",
        "parallelize/fsdp/root_unit.py",
        "for unit in fsdp_modules(self._root)[1:]:  # what stays",
        "for unit in fsdp_modules(self._root)[:0]:  # what stays",
        "tests/trainer/test_memory_options.py::test_units_that_stay_whole_have_the_weights_after_an_update_by_hand",
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
        "[: self._horizon - 1]",
        "",
        f"{OFFLOAD}::test_gradients_are_bitwise_equal_and_a_horizon_is_in_memory[2-]",
    ),
    fault(
        "inputs that leave while the block that made them has long gone on",
        "parallelize/activation_offload/horizon.py",
        "while len(self._leaving) > self._horizon - 1:",
        "while False:",
        f"{OFFLOAD}::test_at_most_a_horizon_of_inputs_is_on_its_way_out[3]",
    ),
)
