"""A small run on one process, for the tests of callbacks."""

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_sp.models import CausalLM, LlamaConfig

LLAMA = LlamaConfig(vocab_size=32, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=48)


def batch(seed=0, num_rows=2, length=16):
    tokens = torch.randint(0, 32, (num_rows, length + 1), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(length).expand(num_rows, -1)
    return {"input_ids": tokens[:, :-1], "position_ids": positions, "shift_labels": tokens[:, 1:]}


def loader(num_batches, seed=0):
    return DataLoader([batch(seed + index) for index in range(num_batches)], batch_size=None)


def fit(tmp_path, *callbacks, num_batches=6, val=True, ckpt_path=None, **options):
    torch.manual_seed(0)
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "logger": CSVLogger(tmp_path, name="", version="logs"),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
        "num_sanity_val_steps": -1,
    }
    trainer = Trainer(**defaults | options, callbacks=list(callbacks))
    validation = loader(2, seed=50) if val else None
    trainer.fit(CausalLM(LLAMA, max_steps=20, lr=1e-2), loader(num_batches), validation, ckpt_path=ckpt_path)
    return trainer
