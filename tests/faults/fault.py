"""A fault as a value: replacements in the sources, and the tests that must fail for them."""

from __future__ import annotations

from dataclasses import dataclass

LAW = "tests/attention/ranks/test_law.py::test_law"
OUT_OF_STEP = (
    "tests/comm/cpu/test_shared_memory.py::test_ranks_that_are_out_of_step_never_read_what_is_being_overwritten"
)
FITS = "tests/trainer/test_fit.py::test_a_fit_is_the_same_in_every_layout"
PACKED = "tests/trainer/test_fit.py::test_packed_and_padded_sequences_through_the_trainer"
EVALUATED = "tests/trainer/test_fit.py::test_evaluation_covers_each_sample_once_and_predict_returns_whole_sequences"
REFUSED = "tests/trainer/test_fit.py::test_refused_by_name_on_all_ranks"
KERNELS = "tests/attention/kernels"
LOSSES = "tests/loss/test_loss.py::test_raw_gradients_and_the_logged_loss_are_those_of_all_tokens[2]"
REWRITTEN = "tests/rewrite/test_gradients.py::test_every_gradient_is_that_of_one_process[2]"
TWO_SEQUENCES = "tests/rewrite/test_encoder_decoder.py::test_every_gradient_is_that_of_one_process[2]"
BLOCK_TABLE = "tests/attention/spec/test_block_mask.py::test_where_they_differ_the_lists_hold"
DROPPED = "tests/context/test_attention_dropout.py"
NOT_CARRIED = "tests/rewrite/test_gradients.py::test_what_cannot_be_carried_is_refused_by_name"


@dataclass(frozen=True)
class Change:
    """One replacement.

    Args:
        file: below `lightning_sp`.
        old: text that the file holds exactly once.
        new: what stands there instead.
    """

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """What goes silently wrong elsewhere.

    Args:
        name: what is wrong, in words.
        changes: together they are the fault.
        tests: pytest's ids; all of these tests must fail.
    """

    name: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]


def fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    """Return a fault of one change."""
    return Fault(name, (Change(file, old, new),), tests)
