"""Faults of sums over whole sequences and batches, and of their gradients."""

from __future__ import annotations

from tests.faults.fault import fault

LAW = "tests/reductions/test_reductions.py::test_law"
EXAMPLES = "tests/reductions/test_examples.py::test_an_example_trains_as_on_one_device"

REDUCTIONS = (
    fault(
        "a filler without a target, taken for rows",
        "reductions/batch.py",
        'kind == "tokens" and not scope.is_filler and',
        'kind == "tokens" and',
        "tests/reductions/test_examples.py::test_a_filler_without_a_target_is_not_taken_for_rows",
    ),
    fault(
        "whole sequences whose gradient is this rank's alone",
        "comm/collectives.py",
        "        total = received.sum(0, dtype=torch.promote_types(received.dtype, torch.float32))\n",
        "        total = received[dist.get_rank(ctx.group)]\n",
        f"{LAW}[1-4-zigzag-21]",
    ),
    fault(
        "padding counted in a mean over the sequence",
        "reductions/scope.py",
        "        return self.positions(sequence, device) < sequence.length\n",
        "        return self.positions(sequence, device) >= 0\n",
        f"{LAW}[2-1-zigzag-19]",
    ),
    fault(
        "whole sequences in the order of the ranks",
        "reductions/whole.py",
        "    whole = layout.merge(comm.gather_over_ranks(x, scope.sequence_group), sequence.layout, dim=dim)\n",
        "    whole = torch.cat(comm.gather_over_ranks(x, scope.sequence_group), dim)\n",
        f"{LAW}[2-1-zigzag-19]",
    ),
    fault(
        "rows added up once for each rank of their sequence",
        "reductions/batch.py",
        "    return total if scope.data_group is None else comm.sum_over_ranks(total, scope.data_group)\n",
        "    return comm.sum_over_ranks(total, scope.step.summed_over)\n",
        f"{LAW}[2-1-zigzag-19]",
    ),
    fault(
        "the mean of the groups' means",
        "reductions/batch.py",
        "        group = scope.step.summed_over\n",
        "        group = scope.sequence_group\n",
        f"{LAW}[2-1-zigzag-19]",
    ),
    fault(
        "a repeated sample counted in the last batch",
        "reductions/scope.py",
        "        return self.is_training and self.step.batch.is_filler\n",
        "        return False\n",
        f"{EXAMPLES}[2 x 1]",
    ),
)
