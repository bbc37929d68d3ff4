"""Models that their user compiled: what each rank runs in test_user_compile.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize import tied_parameters
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import MODELS, Plain, TokenDataset, _full, tiny_gpt

# As much of a compiler as a test can wait for: the graphs are those of Inductor, run eagerly.
BACKEND = "aot_eager"
# One layer where the whole model is one graph.
BUILDS = {**MODELS, "gpt of one layer": tiny_gpt}


def compiled(model: nn.Module, how: str) -> nn.Module:
    """Compile a model as its user would; `how` is "" for one that stays eager."""
    blocks = next((each for each in model.modules() if isinstance(each, nn.ModuleList)), None)
    if how == "torch.compile(model)":
        return torch.compile(model, backend=BACKEND)  # type: ignore[return-value]
    if how == "model.compile()":
        model.compile(backend=BACKEND)
    if how == "block.compile()":
        assert blocks is not None
        for block in blocks:
            block.compile(backend=BACKEND)
    if how == "torch.compile(block)":
        assert blocks is not None
        for index, block in enumerate(blocks):
            blocks[index] = torch.compile(block, backend=BACKEND)  # type: ignore[assignment]
    if how == "torch.compile(function)":
        assert blocks is not None
        for block in blocks:
            block.forward = torch.compile(block.forward, backend=BACKEND)  # type: ignore[method-assign]
    if how == "torch.compile(half)":
        # One of two blocks, so that the strategy's own option finds one that is left.
        assert blocks is not None
        blocks[0] = torch.compile(blocks[0], backend=BACKEND)  # type: ignore[assignment]
    return model


class Compiled(Plain):
    """Builds its model in `__init__` or in `configure_model`, compiles it there, and remembers the weights it began with."""

    def __init__(self, model: str, how: str, early: bool) -> None:
        super().__init__(BUILDS[model])
        self.how = how
        self.first: dict[str, torch.Tensor] = {}
        if early:
            self.configure_model()

    def configure_model(self) -> None:
        if self.model is None:
            self.model = compiled(self.build(), self.how)

    def on_train_start(self) -> None:
        state = self.trainer.strategy.lightning_module_state_dict()
        self.first = {name: _full(value.detach()).clone() for name, value in state.items()}


def fits(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several fits in one call."""
    return [fit(**case) for case in cases]


def fit(
    model: str,
    how: str,
    world: int,
    strategy: dict[str, Any] | None,
    early: bool = False,
    before: bool = False,
    path: str = "",
    resume: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Fit a compiled model, each rank from a seed of its own; what was begun with, losses, weights, graphs.

    Args:
        model: of `BUILDS`.
        how: `compiled`'s.
        world: ranks.
        strategy: None for plain Lightning.
        early: build in `__init__`.
        before: run the model once on a whole sequence before the fit.
        path: of a checkpoint that is saved at the end.
        resume: of one to begin with.
        options: of the Trainer.
    """
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(3 + (dist.get_rank() if dist.is_initialized() else 0))
    module = Compiled(model, how, early or before)
    if before:
        module.double()
        whole = {"input_ids": torch.arange(16)[None], "position_ids": torch.arange(16)[None]}
        for _ in range(2):
            module.logits(whole).sum().backward()
        module.zero_grad()
        module.float()
    trainer = trainer_of(strategy, world, **options)
    try:
        trainer.fit(module, DataLoader(TokenDataset(6), batch_size=2), ckpt_path=resume or None, weights_only=True)
    except SequenceParallelError as error:
        return {"error": str(error)}
    if path:
        trainer.save_checkpoint(path)
    state = trainer.strategy.lightning_module_state_dict()
    return {
        "error": "",
        "first": module.first,
        "losses": module.losses,
        "weights": {name: _full(value.detach()).clone() for name, value in state.items()},
        "graphs": counters["stats"]["unique_graphs"],
        "ties": len(tied_parameters(module)),
    }


class Differing(Plain):
    """Builds another model on rank 1."""

    def __init__(self, kind: str) -> None:
        super().__init__(tiny_gpt)
        self.model = self.build()
        if dist.get_rank() == 1 and kind == "name":
            self.model.extra = nn.Parameter(torch.zeros(3))
        if dist.get_rank() == 1 and kind == "shape":
            self.model.head = nn.Linear(30, 61)
        if dist.get_rank() == 1 and kind == "order":
            self.model._modules["embedding"] = self.model._modules.pop("embedding")
        if dist.get_rank() == 1 and kind == "dropout":
            self.model.dropout.p = 0.5
        if dist.get_rank() == 1 and kind == "frozen":
            self.model.head.weight.requires_grad_(False)


def other_models(kind: str) -> str:
    """Fit where the ranks disagree about the model; return the refusal."""
    try:
        trainer_of(dict(ring_size=2), 2).fit(Differing(kind), DataLoader(TokenDataset(4), batch_size=2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"
