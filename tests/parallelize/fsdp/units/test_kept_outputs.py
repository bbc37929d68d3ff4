"""What a layer puts into an object that it is given, a cache of keys, while its own output is read by nobody."""

from __future__ import annotations

from tests.parallelize.fsdp.units import kept_outputs_ranks as ranks


def test_layers_of_which_the_keys_alone_are_read_are_one_devices(pools):
    for error in pools(2).run(ranks.error):
        assert error < 1e-10
