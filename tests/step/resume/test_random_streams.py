"""How the samples of an optimizer step are numbered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_sp.data.samplers.batch_split import BatchSplit
from lightning_sp.data.samplers.training_sampler import SequentialGlobalBatchSampler
from lightning_sp.step.resume.random_streams import RandomStreams


@pytest.mark.parametrize("split", [(4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)])
def test_a_sample_has_one_number_however_the_global_batch_is_cut(split):
    micro, accumulate, dp_size = split
    for dp_rank in range(dp_size):
        mesh = SimpleNamespace(data_parallel_size=dp_size, data_parallel_rank=dp_rank)
        streams = RandomStreams()
        sampler = SequentialGlobalBatchSampler(11, BatchSplit(micro, accumulate, dp_size), dp_rank, seed=0)
        for place, samples in enumerate(sampler):
            drawn = streams.dropout_source(len(samples), place // accumulate, mesh, torch.device("cpu"))
            real = [(s, n) for s, n in zip(samples, drawn.samples.tolist(), strict=True) if s >= 0]
            assert all(n == s % 4 and drawn.step == s // 4 for s, n in real), (samples, drawn)
