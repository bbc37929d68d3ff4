"""The numbers that an evaluation step shows: what it logs, what it returns, and what its torchmetrics metrics say of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torchmetrics import Metric, MetricCollection

from lightning_sp import comm
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor
from lightning_sp.preflight.recording.attributes import ATTRIBUTE, attributes_of, changed_attributes, number_of
from lightning_sp.step.results.output_structure import leaves_of
from lightning_sp.trainer.logged_numbers.row_metrics import outermost_metrics, parts_of, was_updated
from lightning_sp.users_code.ownership import key_text

# Behind a name: what weighs the number in its mean over an epoch. Synchronized, the ranks' own add up.
WEIGHT = " (batch_size)"
# Of a number that a step hands to its logger by itself.
OF_LOGGER = " (of the logger)"


@dataclass(frozen=True)
class Number:
    """A number as one rank has it.

    Args:
        value: of the step on this rank.
        reduced: over the ranks by which function when it is shown: "mean", "sum", "min" or "max"; empty where each rank shows its own.
        logged: whether it is one that the step has made of its tensors and logged, or one of its metrics.
    """

    value: float
    reduced: str = ""
    logged: bool = False


class StepNumbers:
    """Collects the numbers of a step; a class because the step calls it.

    Args:
        log: `LightningModule.log`, whose arguments these are.
        attributes: of the modules, as they were before the step.
        held: metrics, by identity, that hold what steps before have counted, and nothing of this one.

    Attributes:
        numbers: by the name under which they are shown.
    """

    def __init__(self, log: Any, attributes: Mapping[str, Any], held: Collection[int]) -> None:
        self.numbers: dict[str, Number] = {}
        self._attributes, self._held = attributes, held
        self._names: dict[int, str] = {}  # under which metrics are logged
        self._signature = inspect.signature(log)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Take what `LightningModule.log` is given."""
        with suppress(TypeError):
            given = self._signature.bind(None, *args, **kwargs)
            given.apply_defaults()
            self._take(given.arguments["name"], given.arguments["value"], given.arguments)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Take what `LightningModule.log_dict` is given."""
        items = dictionary.items(keep_base=False) if isinstance(dictionary, MetricCollection) else dictionary.items()
        for name, value in items:
            self.log(name, value, *args, **kwargs)

    def direct(self, metrics: Mapping[Any, Any]) -> None:
        """Take what a step hands to its logger by itself."""
        for name, value in metrics.items():
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
                self.numbers.setdefault(f"{name}{OF_LOGGER}", Number(_plain(value), logged=True))

    def returned(self, output: Any) -> None:
        """Take the single numbers that a step returns."""
        for name, value in (output if isinstance(output, Mapping) else {"loss": output}).items():
            if isinstance(value, Tensor) and value.numel() == 1 and str(name) not in self.numbers:
                self.numbers[f"{name} (returned)"] = Number(_plain(value))

    def handed(self, output: Any) -> None:
        """Take the tensors beside the loss that a training step returns for a hook: of tokens they have other shapes on a part."""
        for path, value in leaves_of(output):
            if not path or path[0] == "loss" or not isinstance(value, Tensor) or isinstance(value, GlobalTensor):
                continue
            if value.numel() and not value.is_complex():
                name = "".join(f"[{key_text(key)}]" for key in path)
                self.numbers[f"training_step's output{name} of shape {tuple(value.shape)}{ATTRIBUTE}"] = Number(
                    number_of(value)
                )

    def attributes(self, module: nn.Module, control_group: ProcessGroup | None, *, evaluates: bool = False) -> None:
        """Take what the step has left in attributes of the user's modules. Every rank must call it.

        Args:
            module: that holds them.
            control_group: the world, on a backend for host objects.
            evaluates: whether the step is none of training.
        """
        changed = changed_attributes(module, self._attributes, control_group, evaluates=evaluates)
        self.numbers |= {name: Number(value) for name, value in changed.items()}

    def metrics(
        self,
        module: nn.Module,
        group: ProcessGroup | None,
        control_group: ProcessGroup | None,
        of_tokens: ProcessGroup | None = None,
    ) -> None:
        """Take what the module's metrics say of the step. Every rank must call it.

        Args:
            module: that holds them.
            group: over which they add up, but for those that name their own ranks.
            control_group: the world, on a backend for host objects: a metric that some ranks left out is left out.
            of_tokens: what metrics that name no ranks were given in steps on parts of sequences.
        """
        held = dict(outermost_metrics(module))
        updated = {name for name, each in held.items() if was_updated(each) and id(each) not in self._held}
        for name in sorted(set.intersection(*comm.gather_objects(updated, control_group))):
            metric = held[name]
            for each in metric.modules():
                if isinstance(each, Metric):
                    named = None if each.process_group is of_tokens else each.process_group
                    each.process_group = named or group or of_tokens
                    each._computed = None
            with suppress(Exception):  # a metric that a crop is too short for
                found = metric.compute()
                # A number logged under the metric's own name is what is shown: by `log("accuracy", self.accuracy(...))` a step's.
                shown = self._names.get(id(metric), f"{name} (metric)" if name in self.numbers else name)
                for part, value in (found if isinstance(found, Mapping) else {"": found}).items():
                    for of_value, number in _numbers_of(value):
                        self.numbers[(part if part and shown == name else shown + part) + of_value] = number

    def _take(self, name: str, value: Any, options: Mapping[str, Any]) -> None:
        if isinstance(value, Metric):
            self._names[id(value)] = name
        elif isinstance(value, (Tensor, int, float)):
            reduce_fx = options.get("reduce_fx", "mean")
            by = _name_of(reduce_fx) if options.get("sync_dist") else ""
            # Whoever names the ranks has decided which of them add up.
            decided = options.get("sync_dist") and options.get("sync_dist_group") not in (None, dist.group.WORLD)
            if not decided and (not isinstance(value, Tensor) or value.numel() == 1):
                self.numbers[name] = Number(_plain(value), {"avg": "mean"}.get(by, by), logged=True)
                if options.get("batch_size") is not None and not options.get("sync_dist"):
                    self.numbers[name + WEIGHT] = Number(_plain(options["batch_size"]))


@contextmanager
def metrics_begin_anew(module: Any) -> Iterator[set[int]]:
    """Let each metric of a module forget what it holds when the block first counts in it; until then the block reads what a step would.

    Yields the metrics, by identity, that hold what steps before have counted.
    """
    found = [metric for _, metric in outermost_metrics(module) if was_updated(metric)]
    held = set(map(id, found))
    with ExitStack() as undo:
        for outermost in found:
            for metric in {id(each): each for each in (outermost, *parts_of(outermost))}.values():
                for name in ("update", "forward"):
                    own = vars(metric).get(name)
                    vars(metric)[name] = _forgetting(getattr(metric, name), outermost, held)
                    undo.callback(vars(metric).pop if own is None else vars(metric).__setitem__, name, own)
        yield held


def _forgetting(own: Callable[..., Any], outermost: Metric | MetricCollection, held: set[int]) -> Callable[..., Any]:
    @wraps(own)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if id(outermost) in held:
            held.discard(id(outermost))
            outermost.reset()
        return own(*args, **kwargs)

    return counted


@contextmanager
def recorded_numbers(module: Any) -> Iterator[StepNumbers]:
    """Collect what a LightningModule logs in the block, instead of logging it; of its metrics what the block counts. Within `isolated`."""
    # Lightning's own: a user's override may take *args.
    log = next(vars(each)["log"] for each in reversed(type(module).__mro__) if "log" in vars(each))
    with metrics_begin_anew(module) as held, ExitStack() as undo:
        found = StepNumbers(log, attributes_of(module), held)
        for logger in getattr(getattr(module, "_trainer", None), "loggers", ()):
            if hasattr(logger, "take"):
                logger.take = found.direct
        for name in ("log", "log_dict"):
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, getattr(found, name))
        yield found


def _numbers_of(value: Any) -> Iterator[tuple[str, Number]]:
    """Yield what is compared of a metric's value: the number itself, sums of several ones, of matrices by their places too."""
    if isinstance(value, (list, tuple)):
        yield from ((f"[{i}]{name}", number) for i, each in enumerate(value) for name, number in _numbers_of(each))
    elif isinstance(value, Tensor) and value.numel() == 1:
        yield "", Number(_plain(value), logged=True)
    elif isinstance(value, Tensor) and value.numel() and not value.is_complex():
        many = value.detach().double()
        yield " (sum)", Number(_plain(many.sum()))
        yield " (sum of squares)", Number(_plain(many.square().sum()))
        if many.dim() > 1:  # a list of tokens may have another order
            places = torch.linspace(1, 2, many.numel(), dtype=many.dtype, device=many.device)
            yield " (sum by places)", Number(_plain((many.flatten() * places).sum()))


def _name_of(reduce_fx: Any) -> str:
    """Return how Lightning reduces over the ranks, in its words; empty for a function that it does not know."""
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    return name.removeprefix("a") if name in ("amax", "amin") else name


def _plain(value: Tensor | float) -> float:
    with torch.no_grad():
        return float(value)
