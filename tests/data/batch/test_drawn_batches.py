"""Any batch is split, or refused by an error of the package: whatever a collate function makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_sp import SequenceLayout, SequenceParallelError, ShardOptions
from lightning_sp.data.batch.sharding import shard_batch

DTYPES = st.sampled_from(
    (torch.int64, torch.int32, torch.float32, torch.float64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8)
)
SIZES = st.sampled_from((0, 1, 2, 3, 4, 6, 8, 16, 17))
SHAPES = st.lists(SIZES, max_size=4)
TENSORS = st.builds(lambda shape, dtype: torch.zeros(shape).to(dtype), SHAPES, DTYPES)
LIKELY = st.builds(
    lambda rows, tokens, dtype: torch.zeros(rows, tokens).to(dtype),
    st.sampled_from((1, 2)),
    st.sampled_from((4, 7, 8, 16)),
    DTYPES,
)
NO_TENSORS = (
    st.none()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.builds(np.zeros, SHAPES)
    | st.lists(st.integers(), max_size=3)
)
ENTRIES = (
    LIKELY
    | TENSORS
    | NO_TENSORS
    | st.dictionaries(st.text(max_size=2), TENSORS, max_size=2)
    | st.lists(TENSORS, max_size=3)
)
NAMES = st.sampled_from(
    (
        *("input_ids", "labels", "shift_labels", "position_ids", "attention_mask", "pixel_values", "x", "y", "seq_idx", "cu_seq_lens_q"),
        *("cu_seq_lens_k", "max_length_q", "inputs_embeds", "token_type_ids", "decoder_input_ids", "loss_mask", 3, ("a", 1)),
    )
)  # fmt: skip
BATCHES = (
    st.dictionaries(NAMES, ENTRIES, max_size=5) | st.tuples(ENTRIES, ENTRIES) | st.lists(ENTRIES, max_size=3) | ENTRIES
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.hypothesis
@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(batch=BATCHES, degrees=st.sampled_from(((2, 1), (1, 2), (2, 2))), packed=st.sampled_from((None, True, False)))
def test_any_batch_is_split_or_refused(batch, degrees, packed):
    layout = SequenceLayout(ring_size=degrees[0], ulysses_size=degrees[1])
    try:
        parts = [
            shard_batch(batch, layout, rank, ShardOptions(packed_documents=packed))[0] for rank in range(layout.size)
        ]
    except SequenceParallelError:
        return
    assert all(isinstance(part, type(batch)) for part in parts)
