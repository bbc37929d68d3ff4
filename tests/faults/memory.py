"""Faults of what is kept in memory, and what is computed again."""

from __future__ import annotations

from tests.faults.fault import fault

CHECKPOINTS = "tests/parallelize/test_activation_checkpointing.py"

MEMORY = (
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
        'if how == "full":',
        'if how == "all":',
        f"{CHECKPOINTS}::test_full_repeats_the_exchanges_of_a_forward",
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
        "self._asked |= {number for number, block in enumerate(self.blocks) if block in parts}",
        "self._asked |= {number for number, block in enumerate(self.blocks) if block not in parts}",
        f"{CHECKPOINTS}::test_a_models_own_checkpointing_is_taken_over[True-none-selective]",
    ),
)
