"""Parameters that a step uses on some ranks only: experts without a token there, a part of the model that a group's batch does not need.

FSDP2 reduces the gradients of a unit as one buffer of those that exist. Where ranks differ in which exist, buffers of different sizes meet:
a hang, or gradients of different parameters are added up. Here a rank without a gradient gives zeros. When a backward has ended, what no rank
used has none, as on one device, where an optimizer leaves it as it is.

A unit must run on all ranks or on none, for its parameters are gathered from all of them; `optional_units` are the exception.

A head may run several times in a forward, for one part of the tokens after the other. FSDP2 would gather and reduce it for each. Here its
gradients are reduced when the first of these calls has had its backward, which comes last.

Who steps an optimizer in the backward is told of a unit when its gradients are complete: when each of its calls has had its backward. Of
those it is told that this rank has used, for what another rank has used is known at the backward's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.gathers.gather_dtypes import GatherDtypes
from lightning_sp.parallelize.fsdp.parameter_groups import parameter_groups
from lightning_sp.parameter_names import user_name

_ATTRIBUTE = "_lightning_sp_unused_parameters"


def complete_gradients(root: nn.Module, units: Sequence[FSDPModule], heads: Sequence[FSDPModule] = ()) -> None:
    """Let each unit of FSDP reduce a gradient for every parameter, zeros where this rank has none.

    Args:
        root: of the units.
        units: the sharded modules.
        heads: those of them that are reduced once, however often a forward calls them.
    """
    setattr(root, _ATTRIBUTE, UsedParameters(units, heads))


def used_parameters(root: nn.Module) -> UsedParameters | None:
    """Return what notes the parameters that a sharded module's backward uses; None where it is not sharded."""
    found: UsedParameters | None = vars(root).get(_ATTRIBUTE)
    return found


class UsedParameters:
    """Which parameters got a gradient in a backward; a class because units tell it as they end and its end asks.

    Args:
        units: the sharded modules.
        heads: those of them that are reduced once, however often a forward calls them.

    Attributes:
        group: the world, on a backend for host tensors; None is torch's default group.
        before_end: called when a backward has ended, before it is asked what was used.
        gather_dtypes: what ranks tell each other of how weights are read, with the same message; None where all are gathered in float32.
        when_complete: called in a backward with a unit's group when no more gradients of it are to come, and with its parameters and whether
            this rank has used each; None where nobody asks. Of some units that is not known before the backward's end: it is not called.
        when_more: called in its place with a unit's group when there are gradients of it that are more than its calls.
        steps_in_backward: whether somebody asks in each backward.
        is_set_aside: whether a backward within a step, which is for itself, is in progress.
    """

    def __init__(self, units: Sequence[FSDPModule], heads: Sequence[FSDPModule] = ()) -> None:
        self.group: ProcessGroup | None = None
        self.before_end: Callable[[], None] = lambda: None
        self.gather_dtypes: GatherDtypes | None = None
        self._groups = parameter_groups(units)
        # By the parameter's number among all of them.
        self._used: set[int] = set()
        self._zeros: set[int] = set()
        self._ran: set[int] = set()
        self._asked: tuple[comm.Largest, int] | None = None
        self.when_complete: Callable[[Any, dict[nn.Parameter, bool]], None] | None = None
        self.steps_in_backward = False
        self.when_more: Callable[[Any], None] = lambda group: None
        self._heads = {number for number, each in enumerate(self._groups) if each in parameter_groups(heads)}
        # Of each unit, its calls that have had no backward.
        self._calls = dict.fromkeys(range(len(self._groups)), 0)
        self._ending = self.is_set_aside = False
        first = 0
        for number, each in enumerate(self._groups):
            each.pre_forward = partial(self._pre_forward, number, each.pre_forward)
            each.post_backward = partial(self._post_backward, number, first, each.post_backward)
            first += len(each.fsdp_params)
        self._parameters = [parameter for each in self._groups for parameter in each.fsdp_params]
        for unit in units:
            # The unit whose backward begins first has it called.
            state: Any = unit._get_fsdp_state()
            state._root_post_backward_final_callback = partial(self._end, state._root_post_backward_final_callback)

    def expect(self, groups: Iterable[Any]) -> None:
        """Let parameter groups reduce zeros in the next reduction though they do not run here: they do on another rank."""
        expected = list(groups)
        self._ran.update(number for number, each in enumerate(self._groups) if each in expected)

    def count_calls(self) -> None:
        """Count the units' calls from now on: what has run before has no backward in what follows."""
        self._calls = dict.fromkeys(self._calls, 0)

    def forget(self) -> None:
        """Forget a backward that was left by an error, and the forward before it."""
        self._used, self._zeros, self._ran = set(), set(), set()
        self.count_calls()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let a backward within a step be for itself: what is known of the step's own stays as it is."""
        before = self._used, self._zeros, self._ran, dict(self._calls), self.when_complete
        self._used, self._zeros, self._ran, self.when_complete = set(), set(), set(self._ran), None
        self.is_set_aside = True
        try:
            yield
        finally:
            self.is_set_aside = False
            self._used, self._zeros, self._ran, self._calls, self.when_complete = before

    @contextmanager
    def keeping_calls(self) -> Iterator[None]:
        """Let a backward within a step, of gradients that may have a graph, be none of the units' last where an optimizer waits for these."""
        before = dict(self._calls)
        try:
            yield
        finally:
            if self.steps_in_backward:
                self._calls = before

    def _pre_forward(self, number: int, pre_forward: Any, *args: Any) -> Any:
        if torch.is_grad_enabled():
            self._ran.add(number)
            # What a backward recomputes has no backward.
            self._calls[number] += torch._C._current_graph_task_id() == -1
        return pre_forward(*args)

    def _post_backward(self, number: int, first: int, post_backward: Any, *args: Any) -> None:
        if number in self._heads and self._calls[number] > 1 and not self._ending:
            self._calls[number] -= 1
            return
        group = self._groups[number]
        for index, each in enumerate(group.fsdp_params, first):
            if _gradient(each) is not None:
                self._used.add(index)
            # A unit that has not run here has run nowhere, unless it is optional: nobody waits for its gradients.
            elif group.reduce_grads and number in self._ran and each.sharded_param.requires_grad:
                if each.sharded_param.grad is None:
                    self._zeros.add(index)
                each.unsharded_param.grad = torch.zeros_like(each.unsharded_param)
        post_backward(*args)
        if not self._ending:
            self._calls[number] -= 1
            self._tell_complete(number, first)

    def _tell_complete(self, number: int, first: int) -> None:
        """Tell who asks if no more gradients of a unit are to come in this backward."""
        group = self._groups[number]
        if self.when_complete is None or not group.reduce_grads:
            return
        if self._calls[number] == 0:  # below it, a backward of what a reentrant checkpoint ran without a graph
            has_gradient = [(i, each.sharded_param) for i, each in enumerate(group.fsdp_params, first)]
            self.when_complete(group, {p: i in self._used for i, p in has_gradient if p.grad is not None})
        elif self._calls[number] < 0:
            self.when_more(group)

    def _end(self, end: Any) -> None:
        """End a backward of FSDP2, and give what no rank used no gradient in place of zeros.

        A rank that used every parameter knows that none is without a gradient: it waits for no other, and reads their answer a backward later.

        Communicates: if gradients were reduced, one all_reduce on the host, of a byte for each parameter, two for each unit and two for each
            weight of which the dtype to gather it in is not decided.

        Raises:
            SequenceParallelError: a unit ran on some ranks only.
        """
        self._ending = True
        try:
            end()
            self.before_end()
        finally:
            self._ending = False
            self.count_calls()
        if not any(group.reduce_grads for group in self._groups):
            return
        used, zeros, ran = self._used, self._zeros, self._ran
        self._used, self._zeros, self._ran = set(), set(), set()
        if comm.size_of(self.group or comm.world()) > 1:
            self.finish()
            if self.gather_dtypes is not None:
                self.gather_dtypes.decide()  # by the answers that all ranks have by now
            self._asked = self._ask(used, ran), len(ran)
            if len(ran) < len(self._groups) or any(
                each.sharded_param.requires_grad for i, each in enumerate(self._parameters) if i not in used
            ):
                used = self.finish()
        for index in zeros - used:
            self._parameters[index].sharded_param.grad = None

    def finish(self) -> set[int]:
        """Return what ranks used in the last backward of which it has not been read; nothing where it has. Every rank must call it.

        Raises:
            SequenceParallelError: a unit ran on some ranks only.
        """
        asked, self._asked = self._asked, None
        if asked is None:
            return set()
        flags, num_ran = asked[0].arrived(), asked[1]
        num, num_units = len(self._parameters), len(self._groups)
        ran, left_out = flags[num : num + 2 * num_units].view(2, -1)
        if bool((ran & left_out).any()):
            raise SequenceParallelError(
                f"{num_ran} of {len(self._groups)} units of FSDP ran on this rank, and others on another: a unit's parameters are gathered "
                "from all ranks when it runs, so those of different units would be mixed; run each part of the model on every rank, and "
                "multiply what a rank does not need by 0"
            )
        if self.gather_dtypes is not None:
            self.gather_dtypes.learn(flags[num + 2 * num_units :])
        return set(flags[:num].nonzero().flatten().tolist())

    def check_reduced(self) -> None:
        """Refuse what a backward has left on whole parameters: nobody would add it to the other ranks', or step by it. Alike on all ranks.

        Raises:
            SequenceParallelError: FSDP's backward had ended before the step's.
        """
        left = [
            each
            for group in self._groups
            if group.reduce_grads
            for each in group.fsdp_params
            if _gradient(each) is not None
        ]
        if left:
            raise SequenceParallelError(
                f"the backward went on when FSDP's had ended: gradients of {user_name(left[0]._param_fqn or '')} and {len(left) - 1} other "
                "parameters were not added up. A reentrant checkpoint (torch.utils.checkpoint.checkpoint, use_reentrant=True) of what runs more "
                "than once in a step ends it: give use_reentrant=False, or use the strategy's activation_checkpointing"
            )

    def _ask(self, used: set[int], ran: set[int]) -> comm.Largest:
        """Ask which parameters any rank used, which units any rank ran, and which any rank left out."""
        num, num_units = len(self._parameters), len(self._groups)
        flags = torch.zeros(num + 2 * num_units, dtype=torch.uint8)
        flags[num + num_units :] = 1
        flags[[*used, *(num + each for each in ran)]] = 1
        flags[[num + num_units + each for each in ran]] = 0
        if self.gather_dtypes is not None:
            flags = torch.cat([flags, self.gather_dtypes.answers()])
        return comm.Largest(flags, self.group)


def _gradient(parameter: Any) -> Any:
    """Return what the backward has left on a parameter of FSDP2, None where nothing or where it was never whole."""
    if not hasattr(parameter, "_unsharded_param"):
        return None
    if parameter.unsharded_accumulated_grad is not None:
        return parameter.unsharded_accumulated_grad
    return parameter.unsharded_param.grad
