"""Any value of any option is taken, or refused by an error of the package that names the option."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from lightning_sp.data import SequenceShardingDataModule

CLASSES = (SequenceParallelStrategy, SequenceShardingDataModule)
WORDS = (
    "auto",
    "none",
    "full",
    "selective",
    "every_2",
    "every_0",
    "every_-1",
    "1",
    "True",
    "hops",
    "0",
    "gloo",
    "inf",
    "nan",
)
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(WORDS)
    | st.binary(max_size=3)
)
# Those that an option may take, so that a wrong one is met beside them.
LIKELY = st.sampled_from((True, False, None, "auto", 1, 2, 0.5, "none", "full", "recomputed", "host", "disk", {"x": 1}))
VALUES = (
    LIKELY | PLAIN | st.lists(PLAIN, max_size=3) | st.tuples(PLAIN, PLAIN) | st.dictionaries(PLAIN, PLAIN, max_size=3)
)


def options_of(kind):
    given = inspect.signature(kind).parameters
    return [name for name, each in given.items() if each.kind is not inspect.Parameter.VAR_KEYWORD]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", CLASSES)
@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_any_value_is_taken_or_refused_by_the_options_name(kind, data):
    options = data.draw(st.dictionaries(st.sampled_from(options_of(kind)), VALUES, min_size=1, max_size=4))
    said = None
    try:
        kind(**options)
    except SequenceParallelError as error:
        said = str(error)
    assert said is None or any(name in said for name in options), (options, said)
