"""Functions of which each number depends on the numbers at its own place: local, with whole tensors cut to this rank's tokens.

Also those along another dim than the sequence (softmax over the vocabulary, a norm over features): `along`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_sp.global_view.calls.call import (
    MOST_NUMBERS,
    NO_RULE,
    Call,
    Rule,
    is_plain,
    is_sequence,
    mapped,
    named,
    placed,
    whole_is_small,
    writes,
)
from lightning_sp.global_view.exchange.lines import along_dim
from lightning_sp.global_view.exchange.movement import as_tokens, brought
from lightning_sp.global_view.rules.draws import drawn
from lightning_sp.global_view.tensors.placement import Placement, broadcast, part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor

NAMES = """
    abs absolute neg negative positive sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin acos atan
    arcsin arccos arctan sinh cosh tanh asinh acosh atanh arcsinh arccosh arctanh sigmoid logit erf erfc erfinv lgamma digamma floor ceil
    round trunc frac fix isnan isinf isfinite isposinf isneginf nan_to_num logical_not bitwise_not invert deg2rad rad2deg sinc i0 softsign
    relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus tanhshrink hardshrink softshrink threshold
    logsigmoid log_sigmoid rrelu
    add sub subtract rsub radd mul multiply rmul div divide true_divide truediv rtruediv rdiv floor_divide floordiv rfloordiv remainder mod
    rmod fmod pow rpow float_power atan2 arctan2 maximum minimum fmax fmin hypot copysign ldexp logaddexp logaddexp2 xlogy nextafter
    eq ne lt le gt ge greater greater_equal less less_equal not_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
    and or xor rand ror rxor iand ior ixor iadd isub imul itruediv idiv
    where masked_fill clamp clip clamp_min clamp_max lerp addcmul addcdiv isclose
    type float double half bfloat16 int long bool short byte cpu cuda contiguous clone detach zero requires_grad
    ones_like zeros_like empty_like full_like dropout alpha_dropout feature_alpha_dropout rand_like randn_like bernoulli
    normal uniform random exponential log_normal cauchy geometric
    fill copy polar real imag conj angle
    entr ndtr log_ndtr ndtri erfcx i0e i1 i1e xlog1py heaviside signbit
    complex polygamma mvlgamma multigammaln frexp resolve_conj resolve_neg conj_physical expit gammaln psi igamma igammac gammainc gammaincc
    gcd lcm lshift rshift bitwise_left_shift bitwise_right_shift fake_quantize_per_tensor_affine
"""


RANDOM = {
    *(
        "dropout",
        "alpha_dropout",
        "feature_alpha_dropout",
        "rrelu",
        "rand_like",
        "randn_like",
        "bernoulli",
        "normal",
        "uniform",
        "random",
    ),
    *("exponential", "log_normal", "cauchy", "geometric"),
}


def pointwise(call: Call) -> Any:
    """Do it on this rank's tokens."""
    if call.name == "where" and len(call.args) + len(call.kwargs) == 1:
        return NO_RULE  # the places where it is true
    written = _written_in_place(call)
    if written is not None and not is_sequence(written):
        call.tensors[0].placement.storage.note_reduction()
        return call.on_wholes()  # as large as what the user has made whole
    if _has_single_token(call, written):
        # Beside a longer sequence one token is a number for all of it: whole on every rank.
        return call.changed(lambda each: each.whole() if is_sequence(each) and each.placement.shown == 1 else each)
    found = aligned(call)
    if found is NO_RULE:
        return NO_RULE
    local, placement = found
    draws = call.name in RANDOM and not _drops_nothing(call)
    result = drawn(call, placement, local.on_locals) if draws else local.on_locals()
    if draws and written is not None and result is not written.local:
        result = written.local.copy_(result)
    if call.name == "contiguous" and placement.is_copy(result):
        result = result.clone()  # as one device does of a slice
    if written is not None:
        return written.renew(result if isinstance(result, Tensor) else written.local)
    return placed(result, placement)


def _drops_nothing(call: Call) -> bool:
    """Return whether a dropout is off."""
    if not call.name.endswith("dropout"):
        return False
    return call.argument(1, "p", 0.5) == 0 or not call.argument(2, "training", True)


def _has_single_token(call: Call, written: Any) -> bool:
    """Return whether a sequence of one token meets something longer."""
    single = [each for each in call.tensors if each.placement.shown == 1]
    if not single or any(each is written for each in single):
        return False
    return len(single) < len(call.tensors) or any(
        is_plain(each) and each.dim() for each in (*call.args, *call.kwargs.values())
    )


def aligned(call: Call) -> Any:
    """Return the call with every tensor local, and where the sequence of its result is; NO_RULE where two dims have it."""
    tensors = call.tensors
    first = tensors[0].placement
    wholes = [each for each in (*call.args, *call.kwargs.values()) if is_plain(each) or isinstance(each, (list, tuple))]
    dims = tensors[0].local.dim()
    if not wholes and all(each.placement == first and each.local.dim() == dims for each in tensors):
        return call, first
    ndim = max(each.dim() for each in [*tensors, *(each for each in wholes if isinstance(each, Tensor))])
    placement = first.at(first.dim + ndim - tensors[0].dim())
    there: dict[int, SequenceTensor] = {}
    for each in tensors:
        other = brought(each, first.storage)
        if not placement.same_tokens(other.placement) and other.placement.shown == placement.shown > 1:
            return _in_one_order(call)
        if each.placement.dim + ndim - each.dim() != placement.dim or not placement.same_tokens(other.placement):
            return _with_smaller_whole(call)
        there[id(each)] = other

    def part(tensor: Any) -> Any:
        return _part(tensor, placement, ndim) if is_plain(tensor) else there.get(id(tensor), tensor)

    args = tuple(mapped(each, part) for each in call.args)
    kwargs = {name: mapped(each, part) for name, each in call.kwargs.items()}
    return replace(call, args=args, kwargs=kwargs), placement


def _in_one_order(call: Call) -> Any:
    """Align tensors whose dims are sequences in other orders, joined rows or blocks: each as one sequence of its own."""
    if not any(each.placement.outer * each.placement.inner > 1 for each in call.tensors):
        return _with_smaller_whole(call)
    tokens = {id(each): as_tokens(each) for each in call.tensors}
    if any(each.placement.outer * each.placement.inner > 1 for each in tokens.values()):
        return NO_RULE
    args = tuple(mapped(each, lambda value: tokens.get(id(value), value)) for each in call.args)
    kwargs = {name: mapped(each, lambda value: tokens.get(id(value), value)) for name, each in call.kwargs.items()}
    return aligned(replace(call, args=args, kwargs=kwargs))


def _with_smaller_whole(call: Call) -> Any:
    """Align tensors whose sequences lie in different dims, with all but the largest whole, or brought to the largest's tokens.

    What is made whole is no larger than what a rank has of the result: of pairs, (B, S, 1, E) and (B, 1, S, E), those of its tokens of the
    first. Pairs that meet their own transpose, x + x.transpose(1, 2), change the dim that is split.
    """
    largest = max(call.tensors, key=lambda each: each.numel())
    others = [each for each in call.tensors if each is not largest]
    if call.args[0] is not largest and writes(call.function):
        return NO_RULE
    size = largest.placement.storage.layout.size
    numbers = (
        largest.numel()
        if all(map(whole_is_small, call.tensors))
        else math.prod(broadcast(*(each.shape for each in call.tensors)))
    )
    most = numbers // size
    if most > MOST_NUMBERS or any(_from_behind(each) == _from_behind(largest) for each in others):
        return NO_RULE
    wholes = {id(each): each.whole() if each.numel() <= most else _of_pairs(each, largest) for each in others}
    if any(each is None for each in wholes.values()):
        return NO_RULE
    args = tuple(mapped(each, lambda value: wholes.get(id(value), value)) for each in call.args)
    kwargs = {name: mapped(each, lambda value: wholes.get(id(value), value)) for name, each in call.kwargs.items()}
    return aligned(replace(call, args=args, kwargs=kwargs))


def _from_behind(x: SequenceTensor) -> int:
    """Return the sequence's dim, counted from the last: tensors are aligned there."""
    return x.placement.dim - x.dim()


def _of_pairs(x: SequenceTensor, like: SequenceTensor) -> SequenceTensor | None:
    """Return what is split along another dim than another tensor, split as that is; None where it has no such dim of its own."""
    dim = like.placement.dim - (like.dim() - x.dim())
    return along_dim(as_tokens(x), dim, like.placement) if dim >= 0 else None


def _part(whole: Tensor, placement: Placement, ndim: int) -> Tensor:
    """Return what of a whole tensor is aligned with this rank's tokens."""
    dim = placement.dim - (ndim - whole.dim())
    if dim < 0 or whole.shape[dim] == 1:
        return whole
    if whole.shape[dim] != placement.shown:
        raise RuntimeError(
            f"The size of tensor a ({placement.shown}) must match the size of tensor b ({whole.shape[dim]}) at dimension {dim}"
        )
    return part_of(whole, placement.at(dim))


def _written_in_place(call: Call) -> Any:
    """Return the tensor that a function writes into; None where it makes a new one."""
    if "out" in call.kwargs and call.kwargs["out"] is not None:
        return call.kwargs["out"]
    return call.args[0] if writes(call.function) or call.kwargs.get("inplace", False) else None


def like_another(call: Call) -> Any:
    """Give a tensor the dtype and device of another, whatever its shape."""
    x, other = call.argument(0, "self"), call.argument(1, "other")
    if call.name == "to" and not isinstance(other, Tensor):
        return NO_RULE
    return x.to(dtype=other.dtype, device=other.device)


def to(call: Call) -> Any:
    """Cast, to a dtype or device that is named or to those of another tensor."""
    found = like_another(call)
    return pointwise(call) if found is NO_RULE else found


def along(call: Call) -> Any:
    """Do what goes along one dim (`dim`), not the sequence's, on this rank's tokens; the number of dims stays."""
    x = call.args[0]
    if not is_sequence(x):
        return NO_RULE
    dim = call.argument(2 if call.name == "topk" else 1, "dim", None if "soft" in call.name else -1)
    if not isinstance(dim, int) or dim % x.dim() == x.placement.dim:
        return NO_RULE
    return placed(call.on_locals(), x.placement)


def gather(call: Call) -> Any:
    """Do a gather or a scatter along another dim than the sequence, whose index is of the sequence too.

    What is split along the dim that is gathered or scattered along (a row of ids for each token, (B, S, S)) is split by the others' first.
    """
    x, dim = call.args[0], call.argument(2 if call.name == "take_along_dim" else 1, "dim")
    if not isinstance(dim, int) or (is_sequence(x) and dim % x.dim() == x.placement.dim):
        return NO_RULE
    dim %= x.dim()
    rows = {each.placement.dim for each in call.tensors if each.dim() == x.dim()} - {dim}
    if len(rows) != 1 or (not is_sequence(x) and "gather" in call.name):
        return NO_RULE
    other = {
        id(each): along_dim(each, min(rows))
        for each in call.tensors
        if each.placement.dim == dim and each.dim() == x.dim()
    }
    if None in other.values():
        return NO_RULE
    args = tuple(other.get(id(each), each) for each in call.args)
    found = aligned(
        replace(call, args=args, kwargs={name: other.get(id(each), each) for name, each in call.kwargs.items()})
    )
    if found is NO_RULE:
        return NO_RULE
    if is_sequence(x) or not writes(call.function):
        return placed(found[0].on_locals(), found[1])
    part, *others = found[0].args  # of a whole tensor
    written = replace(found[0], args=(part.clone(), *others)).on_locals()
    return x.copy_(placed(written, found[1]).whole())


def normalized(call: Call) -> Any:
    """Do a norm over the last dims."""
    x = call.args[0]
    shape = call.argument(1, "normalized_shape")
    count = 1 if isinstance(shape, int) else len(shape)
    if x.placement.dim >= x.dim() - count:
        return NO_RULE
    return placed(call.on_locals(), x.placement)


def embedding(call: Call) -> Any:
    """Look up this rank's tokens."""
    ids = call.args[0]
    if call.argument(3, "max_norm") is not None or call.argument(5, "scale_grad_by_freq", False):
        return NO_RULE  # what it does depends on all tokens
    if not is_sequence(ids) or is_sequence(call.args[1]):
        return NO_RULE
    return placed(call.on_locals(), ids.placement)


def embedding_bag(call: Call) -> Any:
    """Look up this rank's bags, where each is a token's: (tokens, entries), weighed or not."""
    ids, weights = call.args[0], call.argument(8, "per_sample_weights")
    if not is_sequence(ids) or ids.dim() != 2 or ids.placement.dim != 0 or is_sequence(call.args[1]):
        return NO_RULE
    if call.argument(3, "max_norm") is not None or call.argument(5, "scale_grad_by_freq", False):
        return NO_RULE  # what it does depends on all tokens
    if weights is not None and not (is_sequence(weights) and weights.placement == ids.placement):
        return NO_RULE
    return placed(call.on_locals(), ids.placement)


def cell(call: Call) -> Any:
    """Do one step of a recurrent layer on this rank's tokens, each with a state of its own."""
    x, states = call.args[:2]
    several = [states] if isinstance(states, Tensor) else list(states)
    if (
        not is_sequence(x)
        or x.dim() != 2
        or x.placement.dim != 0
        or any(not isinstance(each, Tensor) for each in several)
    ):
        return NO_RULE
    if any(each.dim() != 2 or (isinstance(each, SequenceTensor) and each.placement != x.placement) for each in several):
        return NO_RULE
    own = x.placement
    local = tuple(each.local if isinstance(each, SequenceTensor) else part_of(each, own) for each in several)
    return placed(call.function(x.local, local[0] if isinstance(states, Tensor) else local, *call.args[2:]), own)


def normalize(call: Call) -> Any:
    """Scale vectors that lie along another dim to length 1, or compare them."""
    x = call.tensors[0]
    dim = -1 if call.name == "pairwise_distance" else call.argument(2, "dim", 1)
    if not isinstance(dim, int) or dim % x.dim() == x.placement.dim:
        return NO_RULE
    if call.name == "normalize":
        return placed(call.on_locals(), x.placement)
    found = aligned(call)
    if found is NO_RULE:
        return NO_RULE
    local, own = found
    keeps = call.name == "pairwise_distance" and bool(call.argument(4, "keepdim", False))
    return placed(local.on_locals(), own.at(own.dim - (not keeps and dim % x.dim() < own.dim)))


def one_hot(call: Call) -> Any:
    """Make a dim of classes behind the others; how many there are must be said, for a rank's tokens may lack the highest."""
    ids, classes = call.args[0], call.argument(1, "num_classes", -1)
    return NO_RULE if classes == -1 else placed(call.on_locals(), ids.placement)


def bucketize(call: Call) -> Any:
    """Say between which boundaries each number lies, whole ones or those of its token."""
    x, boundaries = call.argument(0, "input"), call.argument(1, "boundaries")
    if call.name == "searchsorted":
        boundaries, x = call.argument(0, "sorted_sequence"), call.argument(1, "input")
        if is_plain(x) and x.shape[:-1] == boundaries.shape[:-1] and boundaries.placement.dim < boundaries.dim() - 1:
            x = SequenceTensor(part_of(x, boundaries.placement), boundaries.placement)  # of the boundaries' tokens
            return bucketize(replace(call, args=(boundaries, x, *call.args[2:])))
    if (
        is_sequence(x)
        and is_sequence(boundaries)
        and x.placement == boundaries.placement
        and x.dim() == boundaries.dim()
    ):
        if x.placement.dim == x.dim() - 1:
            return NO_RULE
        return placed(call.changed(lambda each: each.local.contiguous() if is_sequence(each) else each), x.placement)
    if not is_sequence(x) or not is_plain(boundaries) or len(call.tensors) > 1:
        return NO_RULE
    is_of_rows = boundaries.dim() > 1 and x.placement.dim < x.dim() - 1
    return NO_RULE if is_of_rows else placed(call.on_locals(), x.placement)


def fake_quantize(call: Call) -> Any:
    """Round to a grid of each channel's own."""
    x = call.args[0]
    channels = call.argument(3, "axis")
    if not is_sequence(x) or len(call.tensors) > 1 or channels % x.dim() == x.placement.dim:
        return NO_RULE
    return placed(call.on_locals(), x.placement)


def glu(call: Call) -> Any:
    """Halve another dim."""
    x, dim = call.args[0], call.argument(1, "dim", -1)
    return NO_RULE if dim % x.dim() == x.placement.dim else placed(call.on_locals(), x.placement)


RULES: dict[str, Rule] = {
    **named(NAMES, pointwise),
    **named("type_as", like_another),
    "to": to,
    **named("softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin sort argsort topk", along),
    **named("gather scatter scatter_add scatter_reduce take_along_dim", gather),
    **named("layer_norm rms_norm", normalized),
    **named("embedding", embedding),
    **named("embedding_bag", embedding_bag),
    **named("normalize cosine_similarity pairwise_distance", normalize),
    **named("one_hot", one_hot),
    **named("bucketize searchsorted", bucketize),
    **named("glu", glu),
    **named("fake_quantize_per_channel_affine", fake_quantize),
    **named("gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell", cell),
}
