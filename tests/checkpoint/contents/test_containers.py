"""Containers of hyperparameters that are no plain ones are what they were, where a module is built of them again."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

import lightning_sp
from lightning_sp.checkpoint.contents.plain import plain_checkpoint

CONFIG = {"width": 3, "half": "${width}", "later": "???", "layers": [{"dim": 1}, {"dim": 2}]}


class Configured(pl.LightningModule):
    def __init__(self, cfg: Any, options: Any = None, kept: Any = None, sizes: Any = ()) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.cfg, self.options, self.sizes, self.kept = cfg, options, sizes, kept
        self.layer = torch.nn.Linear(cfg.width, cfg.layers[1].dim)


class OfOne(pl.LightningModule):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.save_hyperparameters(cfg)
        self.cfg, self.layer = cfg, torch.nn.Linear(1, 1)


def stored(module: pl.LightningModule, path: Any) -> str:
    """Store a module's hyperparameters and weights as a file of ours; return where."""
    held = {"hyper_parameters": module.hparams, "hparams_name": module._hparams_name}
    if isinstance(module.hparams, DictConfig):
        held["hparams_type"] = DictConfig
    plain, refused, _ = plain_checkpoint(held)
    assert refused == []
    torch.save({**plain, "state_dict": module.state_dict(), "pytorch-lightning_version": pl.__version__}, path)
    torch.load(path, weights_only=True)
    return str(path)


def test_a_module_is_built_again_of_omegaconfs_and_argparses(tmp_path):
    config = OmegaConf.create(CONFIG)
    OmegaConf.set_struct(config, True)
    options = Namespace(rate=0.5, inner=OmegaConf.create({"a": {"b": 1}}))
    path = stored(Configured(config, options, sizes=(OmegaConf.create([4, 5]), 6)), tmp_path / "x.ckpt")
    found = Configured.load_from_checkpoint(path)
    assert isinstance(found.cfg, DictConfig)
    assert (found.cfg.half, found.cfg.layers[1].dim, OmegaConf.is_missing(found.cfg, "later")) == (3, 2, True)
    assert OmegaConf.is_struct(found.cfg)
    assert isinstance(found.options, Namespace)
    assert (found.options.rate, found.options.inner.a.b) == (0.5, 1)
    assert isinstance(found.sizes[0], ListConfig)
    assert (list(found.sizes[0]), found.sizes[1]) == ([4, 5], 6)


def test_a_config_that_is_all_of_them_stays_one(tmp_path):
    path = stored(OfOne(OmegaConf.create({**CONFIG, "later": 1})), tmp_path / "x.ckpt")
    found = OfOne.load_from_checkpoint(path)
    assert isinstance(found.cfg, DictConfig)
    assert found.cfg.layers[0].dim == found.hparams.layers[0].dim == 1


def test_a_module_is_not_built_of_what_became_text(tmp_path):
    config = OmegaConf.create(CONFIG)
    path = stored(Configured(config, kept=range(3)), tmp_path / "x.ckpt")
    words = r"hyper_parameters\['kept'\] is builtins.range, which the checkpoint holds as text.*, kept=\.\.\.\)"
    with pytest.raises(lightning_sp.SequenceParallelError, match=words):
        Configured.load_from_checkpoint(path)
    assert Configured.load_from_checkpoint(path, kept=1).kept == 1
