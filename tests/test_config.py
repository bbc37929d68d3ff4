"""The options' rules: every refusal with its numbers, every "auto" with what it becomes."""

from __future__ import annotations

import dataclasses
import re

import pytest

from lightning_sp.config import (
    AttentionKeywords,
    AttentionOptions,
    StrategyConfig,
    check_memory_device,
    ranks_without_heads,
    resolve_degrees,
    resolve_shard_size,
    resolve_split,
)
from lightning_sp.errors import SequenceParallelError, closest

DEGREES = [
    "sequence_parallel_size",
    "data_parallel_size",
    "ulysses_size",
    "ring_size",
    "shard_size",
    "prefetch_blocks",
    "preflight_tokens",
]


def refusal(message):
    return pytest.raises(SequenceParallelError, match=re.escape(message))


@pytest.mark.parametrize("name", DEGREES)
@pytest.mark.parametrize("value", [0, -2, 1.5, True, "two", None])
def test_a_degree_is_a_positive_integer_or_auto(name, value):
    with refusal(f"{name}={value!r}: must be a positive integer or 'auto'"):
        StrategyConfig(**{name: value})


def test_an_unknown_kernel_names_the_nearest():
    with refusal("kernel='flash-attn': must be one of auto, torch, flash_attn; did you mean 'flash_attn'?"):
        StrategyConfig(kernel="flash-attn")


def test_an_unknown_transport_names_the_nearest():
    with refusal("ring_transport='shm': must be one of auto, shared_memory, network"):
        StrategyConfig(ring_transport="shm")
    with refusal(
        "ring_transport='shared-memory': must be one of auto, shared_memory, network; did you mean 'shared_memory'?"
    ):
        StrategyConfig(ring_transport="shared-memory")
    with refusal("ring_method='allgather': must be one of auto, hops, all_gather; did you mean 'all_gather'?"):
        StrategyConfig(ring_method="allgather")


def test_saving_keys_takes_the_network_and_is_refused_where_none_travel():
    with refusal("ring_saves_kv=True with ring_transport='shared_memory': no keys and values travel there"):
        StrategyConfig(ring_transport="shared_memory", ring_saves_kv=True)
    assert StrategyConfig(ring_saves_kv=True).effective_ring_transport == "network"
    for value in ("yes", "False", 1):
        # Hydra hands on "yes" as text, which is true for Python and no bool for the operator's code.
        with refusal(f"ring_saves_kv={value!r}: must be True or False"):
            StrategyConfig(ring_saves_kv=value)
    assert StrategyConfig().effective_ring_transport == "auto"


@pytest.mark.parametrize("stages", [0, -1, 1.0, True, "2", None])
def test_stages_are_counted(stages):
    with refusal(f"ulysses_stages={stages!r}: must be a positive integer"):
        StrategyConfig(ulysses_stages=stages)


def test_stages_divide_the_models_heads_of_a_rank():
    with refusal(
        "ulysses_stages=3 with 8 query heads over ulysses_size=4: every stage has equally many heads on each rank, and a rank has 2; it can be "
        "one of [1, 2] here"
    ):
        resolve_split(StrategyConfig(ulysses_stages=3), 4, 8)
    with refusal("a rank has 2 or 1; it can be one of [1] here"):
        resolve_split(StrategyConfig(ulysses_stages=2, ulysses_size=4), 4, 6)
    assert resolve_split(StrategyConfig(ulysses_stages=2), 4, 8) == (4, 1)
    # Nothing is exchanged, in however many stages; other numbers of heads are met at the attention itself.
    assert resolve_split(StrategyConfig(ulysses_stages=3, ring_size=4), 4, 8) == (1, 4)
    assert resolve_split(StrategyConfig(ulysses_stages=3, ulysses_size=4), 4, None) == (4, 1)


def test_the_keywords_of_the_attention_are_its_options():
    assert list(AttentionKeywords.__annotations__) == [f.name for f in dataclasses.fields(AttentionOptions)]
    options = AttentionOptions(kernel="torch", ring_saves_kv=True)
    assert (
        AttentionOptions(**options.keywords())
        == options
        == StrategyConfig(kernel="torch", ring_saves_kv=True).attention
    )


def test_balance_is_one_of_three_and_needs_the_strategy_to_shard():
    with refusal("balance='document': must be one of auto, zigzag, documents; did you mean 'documents'?"):
        StrategyConfig(balance="document")
    with refusal("balance='documents' with shard_batch=False: batches that are sharded by hand have the zigzag layout"):
        StrategyConfig(balance="documents", shard_batch=False)
    assert StrategyConfig(shard_batch=False).balance == "auto"


@pytest.mark.parametrize("name", ["compile", "preflight", "shard_batch", "save_distributed_checkpoint"])
@pytest.mark.parametrize("value", ["false", 0, None])
def test_a_switch_is_true_or_false(name, value):
    with refusal(f"{name}={value!r}: must be True or False"):
        StrategyConfig(**{name: value})


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        (True, "selective"),
        (False, "none"),
        *((name, name) for name in ("every_1", "every_12", "budget_1", "budget_99")),
        *((name, name) for name in ("auto", "none", "matmuls", "selective", "full")),
    ],
)
def test_activation_checkpointing_is_a_policy_by_name(given, policy):
    compiles = policy.startswith("budget")
    assert StrategyConfig(activation_checkpointing=given, compile=compiles).checkpoint_policy == policy


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("selectiv", "selective"),
        ("every_0", "every_2"),
        ("every_", "every_2"),
        ("every_<n>", ""),
        ("every 3", "every_2"),
        ("budget_100", "budget_50"),
        ("budget_0", "budget_50"),
    ],
)
def test_an_unknown_checkpoint_policy_is_refused_with_the_nearest(given, nearest):
    names = "auto, none, matmuls, budget_<percent>, every_<n>, selective, full"
    words = f"activation_checkpointing={given!r}: must be one of {names} with n a positive integer and percent from 1 to 99, or True"
    with refusal(words) as error:
        StrategyConfig(activation_checkpointing=given)
    assert not nearest or str(error.value).endswith(f"did you mean {nearest!r}?")


@pytest.mark.parametrize("given", [0, -1.5, True, "3", None, float("inf"), float("nan")])
def test_a_memory_budget_is_positive(given):
    with refusal(f"memory_budget_gib={given!r}: must be positive, in GiB for each rank, or 'auto'"):
        StrategyConfig(memory_budget_gib=given)
    assert StrategyConfig(memory_budget_gib=3).memory_budget_gib == 3


@pytest.mark.parametrize("policy", ["none", True, "every_2"])
def test_a_memory_budget_is_for_the_policy_that_chooses_by_it(policy):
    with refusal(
        f"memory_budget_gib=2.5 with activation_checkpointing={policy!r}: a budget is for activation_checkpointing='auto'"
    ):
        StrategyConfig(memory_budget_gib=2.5, activation_checkpointing=policy)


@pytest.mark.parametrize("given", [0, 1, None, 2.0, "", "false"])
def test_a_checkpoint_policy_is_a_name_or_a_bool(given):
    with refusal(f"activation_checkpointing={given!r}: must be one of"):
        StrategyConfig(activation_checkpointing=given)


@pytest.mark.parametrize("name", ["labels_shifted", "packed_documents"])
def test_what_may_be_unsaid_is_true_or_false_or_none(name):
    assert getattr(StrategyConfig(**{name: None}), name) is None
    with refusal(f"{name}='maybe': must be True, False or None"):
        StrategyConfig(**{name: "maybe"})


def test_a_dim_is_a_number():
    with refusal("sequence_dims['x']='1': must be the number of a dim"):
        StrategyConfig(sequence_dims={"x": "1"})


@pytest.mark.parametrize("name", ["timeout_s", "start_timeout_s"])
@pytest.mark.parametrize("seconds", [0, -1.5, float("nan"), float("inf"), True, "300"])
def test_a_timeout_is_positive(name, seconds):
    with refusal(f"{name}={seconds!r}: must be positive, in seconds"):
        StrategyConfig(**{name: seconds})


def test_degrees_that_contradict_each_other():
    with refusal("ulysses_size=2 x ring_size=3 = 6, but sequence_parallel_size=4: their product must be"):
        StrategyConfig(sequence_parallel_size=4, ulysses_size=2, ring_size=3)


def test_an_unknown_option_names_the_nearest_and_all():
    with refusal("unknown option 'ring_sizes' of the sequence_parallel strategy; did you mean 'ring_size'?"):
        StrategyConfig.from_options({"ring_sizes": 2})
    with refusal("known: kernel, ring_transport, ring_saves_kv, ring_method, ulysses_stages, shard_size"):
        StrategyConfig.from_options({"zzz": 2})
    assert StrategyConfig.from_options({"ring_size": 2}) == StrategyConfig(ring_size=2)


def test_closest_is_silent_where_nothing_is_near():
    assert closest("zzz", ["ring", "ulysses"]) == ""
    assert closest("ulyses", ["ring", "ulysses"]) == "; did you mean 'ulysses'?"


@pytest.mark.parametrize(
    ("options", "world", "expected"),
    [
        ({}, 8, (1, 8)),
        ({}, 1, (1, 1)),
        ({"sequence_parallel_size": 4}, 8, (2, 4)),
        ({"data_parallel_size": 4}, 8, (4, 2)),
        ({"data_parallel_size": 2, "sequence_parallel_size": 4}, 8, (2, 4)),
        ({"ulysses_size": 2, "ring_size": 2}, 8, (2, 4)),
        ({"ulysses_size": 2}, 8, (1, 8)),
    ],
)
def test_degrees_resolve_against_the_world(options, world, expected):
    degrees = resolve_degrees(StrategyConfig(**options), world)
    assert (degrees.data_parallel_size, degrees.sequence_parallel_size) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallel_size": 4},
        {"data_parallel_size": 4},
        {"data_parallel_size": 2, "sequence_parallel_size": 2},
        {"ulysses_size": 2, "ring_size": 2},
        {"sequence_parallel_size": 12},
    ],
)
def test_degrees_that_do_not_multiply_to_the_world_name_those_that_do(options):
    dp, sp = options.get("data_parallel_size", "auto"), options.get("sequence_parallel_size", "auto")
    with refusal(f"data_parallel_size={dp} x sequence_parallel_size={sp} (") as error:
        resolve_degrees(StrategyConfig(**options), 6)
    assert "do not multiply to the world of 6 ranks; sequence_parallel_size can be one of [1, 2, 3, 6]" in str(error.value)  # fmt: skip


@pytest.mark.parametrize("name", ["ulysses_size", "ring_size"])
def test_a_part_that_does_not_divide_the_whole_names_those_that_do(name):
    with refusal(f"{name}=4 does not divide sequence_parallel_size=6; it can be one of [1, 2, 3, 6]"):
        resolve_degrees(StrategyConfig(sequence_parallel_size=6, **{name: 4}), 6)


@pytest.mark.parametrize(
    ("options", "sp", "heads", "expected"),
    [
        ({}, 8, 8, (8, 1)),
        ({}, 8, 6, (4, 2)),
        ({}, 8, 1, (1, 8)),
        ({}, 6, 4, (3, 2)),
        ({}, 4, None, (1, 4)),
        ({"ring_size": 2}, 8, 8, (4, 2)),
        ({"ulysses_size": 2}, 8, 8, (2, 4)),
        ({"ulysses_size": 4}, 4, 6, (4, 1)),
        ({"ulysses_size": 2}, 4, None, (2, 2)),
    ],
)
def test_auto_takes_ulysses_as_far_as_the_heads_allow_and_never_alters_what_was_given(options, sp, heads, expected):
    assert resolve_split(StrategyConfig(**options), sp, heads) == expected


@pytest.mark.parametrize("options", [{"ulysses_size": 4}, {"ring_size": 2}])
def test_ulysses_beyond_the_query_heads_names_the_degrees_that_work(options):
    ulysses, ring = resolve_split(StrategyConfig(**options), 8, 3)
    assert (ulysses, ring) == (4, 2)
    said = ranks_without_heads(ulysses, 8, 3) or ""
    assert said.startswith("ulysses_size=4 exceeds the 3 query heads that the model names")
    assert "with sequence_parallel_size=8, ulysses_size can be one of [1, 2], with ring_size = 8 / ulysses_size" in said
    assert ranks_without_heads(2, 8, 3) is None


def test_shard_size_divides_the_world():
    assert resolve_shard_size(StrategyConfig(), 8) == 8
    assert resolve_shard_size(StrategyConfig(shard_size=2), 8) == 2
    with refusal("shard_size=3 does not divide the world of 8 ranks; it can be one of [1, 2, 4, 8]"):
        resolve_shard_size(StrategyConfig(shard_size=3), 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(reshard_after_forward="yes"), "reshard_after_forward='yes': must be True, False or 'auto'"),
        (dict(reshard_after_forward=4), "reshard_after_forward=4: must be True, False or 'auto'"),
        (dict(gather_dtype="bfloat16"), "gather_dtype='bfloat16': must be one of auto, float32"),
        (dict(gradient_dtype="fp32"), "gradient_dtype='fp32': must be one of auto, float32, bfloat16"),
        (dict(cpu_offload="false"), "cpu_offload='false': must be True or False"),
        (dict(activation_offload="cpu"), "activation_offload='cpu': must be one of auto, none, host, disk"),
        (dict(activation_loading_horizon=0), "activation_loading_horizon=0: must be a positive integer"),
        (dict(activation_loading_horizon=True), "activation_loading_horizon=True: must be a positive integer"),
        (
            dict(activation_offload="host", activation_checkpointing=False),
            "activation_offload='host' with activation_checkpointing=False: only the inputs of blocks",
        ),
        (dict(offload_folder=True), "offload_folder=True: must be the path of a folder, or None"),
        (
            dict(offload_folder="/scratch", activation_offload="none"),
            "offload_folder='/scratch' with activation_offload='none' and activation_checkpointing='auto': only activation_offload='disk'",
        ),
        (
            dict(offload_folder="/scratch", activation_checkpointing="full"),
            "offload_folder='/scratch' with activation_offload='auto' and activation_checkpointing='full': only activation_offload='disk'",
        ),
        (
            dict(offload_folder="/scratch", compile=True),
            "activation_offload='auto' and offload_folder='/scratch' with compile=True: torch.compile decides in its own graph",
        ),
        (
            dict(activation_checkpointing=True, activation_offload="disk", compile=True),
            "activation_offload='disk' with compile=True: torch.compile decides in its own graph what is saved",
        ),
    ],
    ids=str,
)
def test_a_memory_option_says_what_it_may_be(options, message):
    with refusal(message):
        StrategyConfig(**options)


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        (
            dict(prefetch_blocks=2),
            "cpu",
            "prefetch_blocks=2 on CPU ranks: a gather over gloo has ended before its call returns",
        ),
        (dict(cpu_offload=True), "cpu", "cpu_offload=True on CPU ranks: their shards are in the host's memory already"),
        (
            dict(activation_checkpointing=True, activation_offload="host"),
            "cpu",
            "activation_offload='host' on CPU ranks: what they compute",
        ),
        (
            dict(activation_checkpointing=True, activation_offload="disk"),
            "cuda",
            "activation_offload='disk' on cuda ranks: the files are written",
        ),
        (
            dict(offload_folder="/scratch"),
            "cuda",
            "offload_folder='/scratch' on cuda ranks: inputs of blocks go to the host's memory",
        ),
    ],
    ids=str,
)
def test_a_memory_option_needs_a_device(options, device, message):
    with refusal(message):
        check_memory_device(StrategyConfig(**options), device)
    check_memory_device(StrategyConfig(**options), {"cpu": "cuda", "cuda": "cpu"}[device])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(stage_inputs="recompute"), "stage_inputs='recompute': must be one of saved, recomputed; did you mean 'recomputed'?"),
        (dict(stage_inputs="recomputed"), "stage_inputs='recomputed' with ulysses_stages=1: one stage has all heads"),
        (
            dict(stage_inputs="recomputed", ulysses_stages=2, ring_saves_kv=True),
            "stage_inputs='recomputed' with ring_saves_kv=True: the one computes keys again for the backward, the other saves them for it",
        ),
        (
            dict(stage_inputs="recomputed", ulysses_stages=2, compile=True),
            "stage_inputs='recomputed' with compile=True: a compiled block is one graph",
        ),
    ],
)  # fmt: skip
def test_stage_inputs_that_do_not_fit(options, message):
    with refusal(message):
        StrategyConfig(**options)


@pytest.mark.parametrize("given", [None, "auto", 64, "as_needed"])
@pytest.mark.parametrize("tier", ["none", "auto"])
def test_what_auto_may_switch_holds_in_no_step_by_itself_and_never_stays_never(given, tier):
    config = StrategyConfig(mlp_tile_tokens=given, activation_offload=tier)
    assert config.fixed_tile_tokens == (None if given == "as_needed" else given)
    assert config.fixed_offload == "none"
    assert config.checkpoint_policy == "auto"
    assert (StrategyConfig().mlp_tile_tokens, StrategyConfig().activation_offload) == ("as_needed", "auto")


@pytest.mark.parametrize("policy", ["auto", True, "full"])
def test_what_auto_may_switch_stands_against_no_other_option(policy):
    for options in (dict(compile=True), dict(global_view=True)):
        StrategyConfig(activation_checkpointing=policy, **options)
    assert StrategyConfig().tries_global_view


def test_recomputed_stages_are_the_modules_and_not_the_operators():
    recomputed = StrategyConfig(ulysses_stages=3, stage_inputs="recomputed")
    assert (recomputed.recomputed_stages, recomputed.attention.ulysses_stages) == (3, 1)
    # 8 heads over 4 ranks: the operator's own three stages are refused.
    assert resolve_split(recomputed, 4, 8) == (4, 1)
    saved = StrategyConfig(ulysses_stages=3)
    assert (saved.recomputed_stages, saved.attention.ulysses_stages) == (1, 3)


def test_checkpoints_beside_the_steps():
    assert StrategyConfig().asynchronous_checkpoints == "auto"
    assert not StrategyConfig(
        asynchronous_checkpoints=False, save_distributed_checkpoint=False
    ).asynchronous_checkpoints
    with refusal("asynchronous_checkpoints='yes': must be True, False or 'auto'"):
        StrategyConfig(asynchronous_checkpoints="yes")
    with refusal(
        "asynchronous_checkpoints=True with save_distributed_checkpoint=False: one file needs the whole model in rank 0's"
    ):
        StrategyConfig(asynchronous_checkpoints=True, save_distributed_checkpoint=False)


def test_how_a_preempted_run_ends():
    assert (StrategyConfig().preemption_limit_s, StrategyConfig().preemption_exit_code) == (300.0, 143)
    for code in (-1, 256, True, 1.5, "requeue"):
        with refusal(f"preemption_exit_code={code!r}: must be a whole number from 0 to 255, as a process ends with"):
            StrategyConfig(preemption_exit_code=code)
    with refusal("preemption_limit_s=0: must be positive, in seconds"):
        StrategyConfig(preemption_limit_s=0)


def test_a_hang_is_named_before_the_run_ends():
    assert StrategyConfig().warns_after_s == 60.0
    assert StrategyConfig(timeout_s=30.0).warns_after_s == 15.0
    assert StrategyConfig(timeout_s=30.0, hang_s=20).warns_after_s == 20
    with refusal(
        "hang_s=300 with timeout_s=300: a run ends at timeout_s, and the warning of a rank that is late comes before; give less"
    ):
        StrategyConfig(hang_s=300.0)
    for seconds in (0, -1.5, float("nan"), True, "soon"):
        with refusal(f"hang_s={seconds!r}: must be positive, in seconds"):
            StrategyConfig(hang_s=seconds)
