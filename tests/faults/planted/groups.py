"""Faults of process groups, and of sequence parallelism that is not there."""

from __future__ import annotations

from tests.faults.fault import FITS, LAW, REFUSED, Change, Fault, fault

GLOO = "tests/parallelize/fsdp/test_gloo_collectives.py"

GROUPS = (
    Fault(
        "sequence parallelism dropped at another shard_size",
        (
            Change(
                "preflight/carried_steps.py",
                "interceptions(context, module, self.config)",
                'interceptions(context, module, self.config, self.config.shard_size == "auto")',
            ),
            Change(
                "step/prepare.py",
                "def interceptions(context: SequenceContext, module: nn.Module, config: StrategyConfig) -> Iterator[None]:",
                "def interceptions(context: SequenceContext, module: nn.Module, config: StrategyConfig, sdpa: bool) -> Iterator[None]:",
            ),
            Change(
                "step/prepare.py",
                "        SdpaInterception(context, names),\n",
                "        SdpaInterception(context, names) if sdpa else contextmanager(lambda: iter([None]))(),\n",
            ),
            Change(
                "step/runner.py",
                "if not self._attention_reached and self.context.mesh.layout.size > 1:",
                "if False:",
            ),
        ),
        (f"{FITS}[2]",),
    ),
    fault(
        "attention that nobody saw",
        "step/runner.py",
        "if not self._attention_reached and self.context.mesh.layout.size > 1:",
        "if False:",
        f"{REFUSED}[no attention-]",
    ),
    fault(
        "one group for all meshes of the process",
        "comm/groups.py",
        "    return _new_groups(blocks)\n",
        '    return globals().setdefault("_kept", _new_groups(blocks))  # type: ignore[no-any-return]\n',
        f"{LAW}[32-4]",
    ),
    fault(
        "the first model's mesh for a second one",
        "step/meshes.py",
        "mesh = SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses)",
        'mesh = globals().setdefault("_kept", SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses))',
        "tests/rewrite/test_gradients.py::test_a_second_model_in_the_same_process",
    ),
    fault(
        "FSDP's gathers on the group of the world",
        "mesh.py",
        'groups = [make_group(_blocks(ranks, axis), name.replace("dp", "fsdp")) for name, axis in axes.items()]',
        "blocks = [_blocks(ranks, axis) for axis in axes.values()]\n"
        '    groups = [torch.distributed.group.WORLD if len(b) == 1 else make_group(b, "fsdp") for b in blocks]',
        "tests/comm/test_comm.py::test_fsdp_shares_no_group_with_the_attention",
    ),
    fault(
        "FSDP's groups of ranks that are not neighbours",
        "mesh.py",
        'name.replace("dp", "fsdp")) for name, axis in axes.items()]',
        'name.replace("dp", "fsdp")) for name, axis in reversed(axes.items())]',
        "tests/comm/test_comm.py::test_fsdp_shares_no_group_with_the_attention",
    ),
    fault(
        "a group's size checked against the world",
        "config/degrees.py",
        "    if dp * sp != world_size or dp == 0:\n",
        "    if sp != world_size:\n",
        "tests/test_config.py::test_degrees_resolve_against_the_world[options2-8-expected2]",
    ),
    fault(
        "samples compared over the world",
        "comm/agreement.py",
        "of_groups[0, report.data_parallel_rank], of_groups[1, report.data_parallel_rank] = number, -number",
        "of_groups[0, 0], of_groups[1, 0] = number, -number",
        "tests/comm/test_comm.py::test_ranks_of_one_sequence_hold_one_batch[same]",
    ),
    fault(
        "an average over ranks that is their sum",
        "parallelize/fsdp/gloo_collectives.py",
        "divisor = size if op == dist.ReduceOp.AVG else 1",
        "divisor = 1",
        f"{GLOO}::test_a_reduction_of_whole_numbers_is_the_default_one[torch.float32-sync-avg-2]",
        f"{GLOO}::test_mixed_precision_is_bit_equal_where_two_are_summed[(2,)-torch.float32]",
    ),
    fault(
        "a gather that nobody waits for",
        "comm/cpu/all_pairs.py",
        "class AllPairs(dist.Work):",
        "class AllPairs:",
        f"{GLOO}::test_a_gather_ahead_of_time_is_waited_for",
    ),
    fault(
        "gradients added up in bfloat16",
        "comm/cpu/all_pairs.py",
        "wide = torch.promote_types(output.dtype, torch.float32)",
        "wide = output.dtype",
        f"{GLOO}::test_the_sum_runs_in_rank_order_and_is_rounded_once[torch.bfloat16-sum-4]",
    ),
    fault(
        "torch's own collectives on gloo",
        "parallelize/fsdp/shard_model.py",
        "    use_all_pairs_collectives(fsdp_modules(root), mesh)\n",
        "",
        f"{GLOO}::test_shard_model_applies_them[(2, 2)]",
    ),
)
