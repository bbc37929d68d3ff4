"""Faults of what changes scores and hides keys: dense masks, biases, functions, dropout, cross attention."""

from __future__ import annotations

from tests.faults.fault import BLOCK_TABLE, LAW, NOT_CARRIED, REWRITTEN, fault

SCORES = (
    fault(
        "partials of queries that saw no key merged by a number that is none",
        "attention/kernels/merge.py",
        "(block_lse - lse).nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)",
        "(block_lse - lse)",
        f"{LAW}[32-4]",
    ),
    fault(
        "queries that see no key of a tile divided by nothing",
        "attention/kernels/tiled.py",
        "shift = highest.masked_fill(highest == -math.inf, 0.0) if self.scores.hides else highest",
        "shift = highest",
        f"{LAW}[32-1]",
    ),
    fault(
        "a whole mask read at a rank's own places",
        "attention/schemes/ring.py",
        "queries = global_positions(layout.ring_chunks(self.plan.length, self.rank), k.device)",
        "queries = global_positions(((0, k.shape[2]),), k.device)",
        f"{LAW}[32-2]",
    ),
    fault(
        "keys that travelled numbered as if all had",
        "attention/schemes/ring.py",
        "arriving = self.arriving(hop)[0] if hop else None",
        "arriving = [(0, sum(b - a for a, b in self.arriving(hop)[0]))] if hop else None",
        f"{LAW}[32-4]",
    ),
    fault(
        "a rank's heads numbered from 0",
        "attention/operator.py",
        "heads = ulysses.queries if spec.scores.names() else None",
        "heads = ulysses.split.queries(0) if spec.scores.names() else None",
        f"{LAW}[32-2]",
    ),
    fault(
        "gradient of a bias from its last tile alone",
        "attention/spec/scores.py",
        "part[:, :, queries[:, None], keys] += tile.to(whole.dtype)",
        "part[:, :, queries[:, None], keys] = tile.to(whole.dtype)",
        f"{LAW}[32-4]",
    ),
    fault(
        "blocks of which something is hidden not sent",
        "attention/plan/block_sparsity.py",
        "(~hidden).flatten(0, 1).any(0)",
        "(~hidden).flatten(0, 1).all(0)",
        f"{LAW}[32-4]",
    ),
    fault(
        "a query's second run of keys written over its first",
        "attention/plan/blocks.py",
        "block if number == 0 else replace(block, opens=False)",
        "block",
        f"{LAW}[32-4]",
    ),
    fault(
        "a shard's block mask looked at for its first head",
        "rewrite/flex.py",
        "(0, query.shape[1]), queries, keys)",
        "(0, 1), queries, keys)",
        NOT_CARRIED,
    ),
    fault(
        "a block mask's lists not read",
        "attention/spec/score_mod.py",
        "if self.table is None:",
        "if True:",
        REWRITTEN,
    ),
    fault(
        "blocks that are seen whole asked for all the same",
        "attention/spec/score_mod.py",
        "return (asked & self._answers(self.table.inside(positions))) | whole",
        "return (asked | whole) & self._answers(self.table.inside(positions))",
        BLOCK_TABLE,
    ),
    fault(
        "tiles of which something is hidden left out",
        "attention/kernels/tiled.py",
        "not bool(hidden.all())",
        "not bool(hidden.any())",
        f"{LAW}[32-1]",
    ),
    fault(
        "a softcap's slope taken from the capped score",
        "attention/spec/scores.py",
        "1 - torch.tanh(raw / self.softcap).square()",
        "1 - torch.tanh(torch.tanh(raw / self.softcap)).square()",
        f"{LAW}[32-1]",
    ),
    fault(
        "keys of cross attention counted as its queries",
        "attention/plan/intervals.py",
        "pairs = zip(pairwise(documents), pairwise(_row(mask.key_boundaries, row, [0, keys])), strict=True)",
        "pairs = zip(pairwise(documents), pairwise(documents), strict=True)",
        f"{LAW}[32-1]",
    ),
    fault(
        "dropout by a rank's own places",
        "attention/spec/dropout.py",
        "_mix(key[..., None] ^ positions.queries)",
        "_mix(key[..., None] ^ torch.arange(len(positions.queries), device=device))",
        f"{LAW}[32-4]",
    ),
    fault(
        "another dropout in the backward",
        "attention/kernels/tiled.py",
        "self._dropped(grads @ values.transpose(-1, -2), here)",
        "grads @ values.transpose(-1, -2)",
        f"{LAW}[32-1]",
    ),
    fault(
        "samples of other data-parallel ranks given one dropout",
        "attention/spec/dropout.py",
        "samples = rows if self.samples is None else self.samples.to(device)[rows]",
        "samples = rows",
        "tests/attention/spec/test_dropout.py::test_dropout_numbers_samples_and_not_rows",
    ),
    fault(
        "autocast within the operator",
        "attention/operator.py",
        "torch.set_autocast_enabled(device, False)",
        "torch.set_autocast_enabled(device, True)",
        "tests/attention/test_sequence_parallel.py::test_autocast_rounds_what_it_is_given_and_no_sum_within[False-softcap]",
    ),
)
