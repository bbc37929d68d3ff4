"""Faults of what is kept in memory, and what is computed again."""

from __future__ import annotations

from tests.faults.fault import fault

CHECKPOINTS = "tests/parallelize/test_activation_checkpointing.py"

MEMORY = (
    fault(
        "a budget compared to the shortest rank's peak",
        "step/auto_checkpointing.py",
        "numbers = torch.tensor([model.fixed, -budget, batch.local_tokens, *slopes])",
        "numbers = torch.tensor([model.fixed, -budget, 1, *slopes])",
        "tests/step/test_auto_checkpointing.py::test_a_longer_batch_recomputes_and_a_line_says_so",
    ),
    fault(
        "a longer batch that is not looked at",
        "data/batch/collective_shard.py",
        "info.local_tokens > most_tokens",
        "info.local_tokens > most_tokens > 0",
        "tests/step/test_auto_checkpointing.py::test_a_given_budget_that_nothing_fits_is_refused_on_all_ranks_alike",
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
