"""Why a test of Lightning's fails with this package's strategy, by what it says: a few kinds, the first that fits.

A kind is a fact of the test's text, not a judgement: what is none of them is `OTHER`, and is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CLASS = "asks for a class of Lightning's, or what that class alone has"
MOCKS = "calls one hook of Lightning's class, with mocks, or for the words of its error"
NO_ERROR = "expects an error or a warning of DDP's, or of its launcher's: there is none to give"
REFUSED = "refused by name"
OTHER = "another"
KINDS = (CLASS, MOCKS, NO_ERROR, REFUSED, OTHER)

_OF_CLASS = re.compile(
    r"isinstance\(.*(strateg|Strateg|DistributedSampler|DistributedDataParallel|_layer_sync)|issubclass\("
    # Attributes of DDPStrategy and of its launcher, which no other strategy has.
    r"|has no attribute '(_ddp_kwargs|_collect_rank_zero_results|test_val|_start_method|_ddp_comm_hook)'"
    # Lightning's own checks of the strategy's class.
    r"|is not compatible with an interactive environment|Using a compiled model is incompatible"
)
_OF_MOCKS = re.compile(
    r"Mock|mock\.|call_count|assert_called|environment variable RANK expected"
    # `patch.object(Strategy, "backward", wraps=strategy.backward)`: of a strategy that has one of its own, it calls itself.
    r"|maximum recursion depth exceeded"
)
_MOCKED_FILE = "strategies/test_model_parallel.py"


def kind(answer: Mapping[str, Any]) -> str:
    """Return the kind of a failure."""
    statement, reason = str(answer.get("statement", "")), str(answer.get("reason", ""))
    if _OF_CLASS.search(statement) or _OF_CLASS.search(reason):
        return CLASS
    if str(answer["name"]).startswith(_MOCKED_FILE) or _OF_MOCKS.search(statement) or _OF_MOCKS.search(reason):
        return MOCKS
    if reason.startswith("Failed: DID NOT"):
        return NO_ERROR
    return REFUSED if reason.startswith("SequenceParallelError") else OTHER
