"""A tensor that a training step leaves in an attribute is whole where a hook reads it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lightning_sp.trainer.hooks.hook_reads import read_in_hooks, reader_of_paths
from tests.trainer.hooks import hook_reads_ranks as ranks


def test_names_in_hooks_and_in_what_they_call_are_known():
    module, callback = ranks.Keeping("module"), ranks.Reader()
    found = read_in_hooks(SimpleNamespace(lightning_module=module, callbacks=[]))
    assert {"last_logits", "seen"} <= found
    unread = SimpleNamespace(lightning_module=ranks.Unread("none"), callbacks=[])
    assert "last_logits" not in read_in_hooks(unread)
    unread.callbacks = [callback]
    assert "last_logits" in read_in_hooks(unread)


def test_code_that_reads_where_checkpoints_are_is_known():
    module = ranks.Keeping("module")
    trainer = SimpleNamespace(lightning_module=module, callbacks=[ranks.Reader()], loggers=[])
    assert reader_of_paths(trainer) == ""
    trainer.callbacks.append(ranks.Uploader())
    assert reader_of_paths(trainer) == "Uploader.on_validation_end reads best_model_path"
    trainer.callbacks, trainer.loggers = [], [ranks.UploadingLogger()]
    assert reader_of_paths(trainer) == "UploadingLogger.after_save_checkpoint reads last_model_path"


@pytest.mark.parametrize("kind", ["module", "callback"])
def test_what_a_hook_makes_of_a_steps_tensor_is_one_devices(pools, kind):
    [plain] = pools(1).run(ranks.fit, 1, kind)
    for found in pools(2).run(ranks.fit, 2, kind):
        assert found["seen"] == pytest.approx(plain["seen"], rel=1e-10)
        assert found["whole"]


def test_what_no_hook_reads_stays_a_part(pools):
    for found in pools(2).run(ranks.fit, 2, "none"):
        assert found == {"seen": [], "whole": False}
