"""Crops as later batches may be, of batches that several loaders give at once."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.preflight.crops.crop import Crop
from lightning_sp.preflight.crops.later_batches import try_uneven_counts


def test_a_group_has_fewer_targets_in_the_batch_of_each_loader():
    loader = {"input_ids": torch.full((4, 12), 7), "labels": torch.full((4, 12), 9)}
    whole = Crop(batch={"one": dict(loader), "other": dict(loader)}, rows=4, tokens=12, num_targets=None)
    own = replace(whole, rows=2)
    tried = []

    def attempt(crop, part, words):
        tried.append((crop, words))
        return True

    try_uneven_counts(whole, own, 0, {}, ShardOptions(global_view=True, labels_shifted=True), attempt)
    [(crop, words)] = tried
    assert words == "fewer tokens that count in one group (ignored targets)"
    for each in crop.batch.values():
        counts = (each["labels"] != -100).sum(1)
        assert counts[:2].max() < counts[2:].min() == 12
