"""Whether a ring takes its keys hop by hop or all at once: as the user says, or on CPU ranks by a model of what the two cost a rank.

    saved by all_gather    kernel calls it does without      (hops' calls - its calls) x call_s
    its price              copies and sums of the keys and their gradients        TOUCHED x needed bytes / bytes_per_s

beside the same work, for a forward and a backward. Messages cost both the same, byte for byte; on a CPU they are work like any other, and
nothing hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from lightning_sp.attention.plan.blocks import Plan
from lightning_sp.attention.schemes.ring import Ring

# How often the bytes of the needed keys and values are written where all come at once, and are not in hops: laid in order twice (forward and
# backward), their gradients made zero, added to, and packed.
TOUCHED = 6


@dataclass(frozen=True)
class Rates:
    """What things cost on a kind of device.

    Args:
        call_s: a kernel call and the hop and the merge that go with it, forward and backward, in seconds, without the work itself.
        bytes_per_s: of copies into new memory.
    """

    call_s: float
    bytes_per_s: float


# Measured on 2 cores (docs/log/ring.md, "Hops or all at once"). No GPU has been measured: hops there, which take less memory.
RATES = {"cpu": Rates(call_s=4e-4, bytes_per_s=4e9)}


# By plan and bytes of a token: layers share their plan, and a decision goes with it.
_decided: WeakKeyDictionary[Plan, dict[int, bool]] = WeakKeyDictionary()


def uses_all_gather(ring: Ring, *, token_bytes: int, device_type: str) -> bool:
    """Return whether all keys come first; the same on all ranks of the ring, for it is reckoned for its first.

    Args:
        ring: who holds what, and by which `ring_method`.
        token_bytes: of the keys and values of a token.
        device_type: of the tensors; only a CPU was measured, elsewhere "auto" takes hops.
    """
    method = ring.options.ring_method
    if ring.size == 1 or method == "hops":
        return False
    rates = RATES.get(device_type)
    if method == "all_gather" or rates is None:
        return method == "all_gather"
    known = _decided.setdefault(ring.plan, {})
    if token_bytes not in known:
        known[token_bytes] = _pays(ring.plan, token_bytes, rates)
    return known[token_bytes]


def _pays(plan: Plan, token_bytes: int, rates: Rates) -> bool:
    size, at_once = plan.layout.ring_size, plan.all_gather(0)
    calls = sum(len(plan.blocks(0, source)) for source in range(size)) - len(at_once.blocks)
    return calls * rates.call_s > TOUCHED * at_once.num_keys * token_bytes / rates.bytes_per_s
