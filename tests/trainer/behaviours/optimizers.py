"""Optimizers of torch and of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Adafactor

from tests.trainer.behaviours.harness import BEHAVIOURS, Run
from tests.trainer.behaviours.users import User, fitted


def _optimizer(name: str, make: Any, **options: Any) -> None:
    class Stepping(User):
        def configure_optimizers(self) -> Any:
            return make(self.parameters())

    def run_it(run: Run) -> dict[str, Any]:
        return fitted(run, Stepping(), **options)

    BEHAVIOURS[f"optimizer {name}"] = run_it


for _name in (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "ASGD", "Adadelta", "Rprop", "Adafactor"
):  # fmt: skip
    _optimizer(_name, lambda p, n=_name: getattr(torch.optim, n)(p, lr=0.01))
_optimizer("AdamW fused", lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
_optimizer("AdamW foreach", lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True))
_optimizer("AdamW amsgrad", lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True))
_optimizer("Adam tensor lr", lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)))
_optimizer("SGD momentum", lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True))
_optimizer("LBFGS", lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3))
_optimizer("LBFGS strong wolfe", lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"))
_optimizer("Muon", lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=0.01))
_optimizer("SparseAdam", lambda p: torch.optim.SparseAdam(p, lr=0.01))


def _of_transformers(parameters: Any) -> Any:
    return Adafactor(parameters, lr=0.01, relative_step=False, scale_parameter=False)


def _of_transformers_relative(parameters: Any) -> Any:
    return Adafactor(parameters, relative_step=True, warmup_init=True, scale_parameter=True)


_optimizer("transformers Adafactor", _of_transformers)
_optimizer("transformers Adafactor relative", _of_transformers_relative)
