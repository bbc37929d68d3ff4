"""Writes docs/global_view.md, the rules of the global view, from the table itself: `python -m tools.rules_table`."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from lightning_sp.global_view.calls.call import Rule
from lightning_sp.global_view.rules import (
    backwards,
    composed,
    draws,
    losses,
    pictures,
    pointwise,
    products,
    properties,
    shapes,
    statistics,
)
from lightning_sp.global_view.rules.along_sequence import (
    convolutions,
    norms,
    rearrangement,
    reductions,
    resampling,
    scans,
    spectra,
    whole_lines,
    whole_matrices,
)
from lightning_sp.global_view.rules.attention import multihead, scaled_dot_product, score_rows, scores
from lightning_sp.global_view.rules.indexing import chosen, into_whole, packed_rows, taking, writing

TARGET = Path(__file__).parents[1] / "docs" / "global_view.md"
ROOMS: Mapping[str, tuple[ModuleType, str]] = {
    "Number by number": (
        pointwise,
        "Local. A whole tensor among the arguments is cut to this rank's tokens where the two are aligned.",
    ),
    "Drawn classes": (
        draws,
        "Local: each rank draws for its own tokens. In a trial, and by a generator of the user's, of the gathered whole.",
    ),
    "Shapes": (shapes, "Local. Where the sequence goes follows from how many numbers lie before and behind a token."),
    "Taking tokens": (
        taking,
        "A slice from the first token on sends one token; another moves tokens; single tokens become whole on every rank.",
    ),
    "Writing": (writing, "Into this rank's tokens; what is written is brought to them."),
    "Chosen tokens": (
        chosen,
        "A whole index of (rows * tokens, features) chooses tokens, an expert's say: each rank has those of its own. Local.",
    ),
    "Other places": (rearrangement, "One all-to-all of the tokens that change their rank."),
    "Whole lines": (
        whole_lines,
        "Along the sequence, each line (a row's feature, a row) by itself. Each rank gets whole lines: two all-to-alls.",
    ),
    "Folds, undone pools, samples": (resampling, "Of whole lines, of rows and channels: two all-to-alls."),
    "Whole matrices": (
        whole_matrices,
        "Whose rows or columns are tokens. Each rank gets whole ones, of some rows of the batch: two all-to-alls.",
    ),
    "Packed rows": (
        packed_rows,
        "`torch.nn.utils.rnn`: each token that counts stays where it is; a recurrent layer gets whole rows, by two all-to-alls.",
    ),
    "Fourier transforms": (spectra, "Along other dims local; along the sequence of whole lines."),
    "Convolutions": (
        convolutions,
        "One all-to-all for each place of the kernel along the sequence, of the tokens that change their rank.",
    ),
    "Norms over the sequence": (norms, "Mean and variance are one all_reduce each; the rest is local."),
    "Added up in a whole tensor": (
        into_whole,
        "Each rank adds its tokens; then one all_reduce of the result, which is whole.",
    ),
    "Sums, means, maxima": (
        reductions,
        "Over other dims local; over the sequence one all_reduce of the result, which is whole.",
    ),
    "Running sums": (scans, "Along the sequence: of each rank's runs of tokens, and of what lies ahead of them."),
    "Products": (
        products,
        "Over features local; over the sequence one all_reduce; queries with keys are an attention.",
    ),
    "Attention that is written out": (scores, "Noted, and computed by the operator at the product with the values."),
    "Rows of an attention that is written out": (
        score_rows,
        "Noted likewise: the largest score of each query, which a softmax does not see, and sinks.",
    ),
    "torch's own attention": (
        scaled_dot_product,
        "Of the sequence by the operator; within rows or blocks local; with whole queries or keys by products and a softmax.",
    ),
    "nn.MultiheadAttention": (multihead, "By the rules of its parts."),
    "Losses": (
        losses,
        "Number by number, then the mean or sum over the whole; `F.cross_entropy` as everywhere in a step.",
    ),
    "By other functions": (composed, "What other functions of torch make up, by their rules."),
    "Pixels": (pictures, "Of pictures whose rows or columns are the sequence, by other functions, too."),
    "Statistics": (statistics, "Likewise."),
    "Backwards": (backwards, "Which the backward of an `autograd.Function` of yours may call."),
    "What a tensor says of itself": (properties, "Of what is shown, or of this rank's part where it is autograd's."),
}
HEAD = """# The global view

    Trainer(strategy=SequenceParallelStrategy(global_view=True), devices=8)

A step sees whole sequences. Its tensors have the shape that one device would see, and each rank holds its part. Code
that looks along the sequence is exact as it is written. The default, `"auto"`, lets a step see its rank's part, which
is faster; where that is refused, by the preflight or for the batch, it tries the step in the global view, says so, and
trains there if the preflight agrees. Training and each kind of evaluation have a view of their own. `False` leaves it
refused.

    def training_step(self, batch, batch_idx):
        ids, mask = batch["input_ids"], batch["attention_mask"]  # (B, S) on every rank, which has S / n of the tokens
        tokens = ids.shape[1]
        x = self.embed(ids) + self.positions(torch.arange(tokens, device=ids.device))
        scores = (self.q(x) @ self.k(x).mT) / 8  # noted, not made
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=ids.device).tril()
        x = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ self.v(x)  # one attention of Ulysses and ring
        pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + pooled.square().mean()

Three things are enough to know.

1. A tensor of the batch that carries the sequence is a `SequenceTensor`. What is computed of it number by number stays
   one.
2. Every other tensor is whole on every rank: what `arange` gives, buffers, a pooled row, a loss.
3. What has no rule is made whole for the call where it has few numbers for each token: ids, masks, a loss of each
   token. Where it has many, it is refused with your line. `lightning_sp.reductions.unshard(x)` makes it whole, if
   memory allows.

Logits of an output head wait until a loss reads them, and are made in chunks, as without the global view
([losses.md](losses.md#loss-without-logits)).

A whole mask of an attention has S x S numbers, as on one device; `F.scaled_dot_product_attention(..., is_causal=True)`
has none. A mask that is causal or a window, as bool or as 0 and -inf that are added, and a causal one with padding, is
known again: the operator gets no matrix, and none is saved for the backward. Scores are made only where a model does
what the operator does not: then a rank has those of its queries. The preflight compares the step with one device's, as
always.

A slice along the sequence is a view on one device, and a copy here. `x[:, 0] += y`, `x[:, 1:].mul_(2)` and
`view.copy_(y)` write to `x`, too; a slice that is read once `x` was written to is taken again. What is written into a
tensor that you made, `out = torch.zeros(B, S, E)`, is made whole for it, as `out` is.

`torch.vmap` over tokens runs on each rank's own; over rows or heads one after the other. `torch.autograd.grad(loss, x)`
of a tensor of the sequence is one device's: for adversarial training, and for gradient penalties (`create_graph=True`).

A function of torch that is written in Python, most losses of `F` among them, needs no rule: it runs by the rules of its
parts. So does an `autograd.Function` of yours: its `forward` and its `backward` run by the rules of what they call (a
parallel scan, attention with a gradient of its own, statistics of all tokens), with the same `ctx`. One that computes
number by number runs on each rank's part, if its first call gives a token the same beside twice as many tokens. Refused
are those whose gradient is not linear (a clamp, a norm: gradients of a step are scaled until its backward has ended),
that write into what they are given, or that call a kernel of their own. `torch.utils.checkpoint` with
`use_reentrant=True` does what it does with `False`.

## Compiled

    SequenceParallelStrategy(global_view=True, compile=True)                                     # torch 2.13

The forward of each block is captured by torch.compile as it is written, on whole shapes. The rules run while its graph
is made; what is left of it is this rank's part, the attention's operator and the collectives. Without `compile=True`
each function costs about 10 microseconds of Python more than on a part.

- A second length is no second graph. A mask that a block makes of lengths and buffers is known as a band before the
  graph runs, whatever the length; one that is no band has a graph for each length.
- Where a rule needs numbers that are not there, the graph breaks, and that function runs as without `compile=True`:
  dropout that drops, attention within packed documents, tokens that move along the sequence, a bias that is learned.
- A graph that cannot be made, for it looks at numbers of a mask that is no constant, runs function by function. A line
  names the reason, and your line of code.
- What torch.compile itself fails at runs as it is written, and what that calls is compiled: one line names the function
  and the reason. An `autograd.Function` of yours runs between two graphs.
- `activation_checkpointing` is told to the graph: "selective" saves the attention and what ranks sent, "full" the
  graph's inputs alone, "budget_50" beside the attention half of the bytes of what else a graph would, those that cost
  the most to compute again. What stands between two graphs is kept.
- A graph that a slice or a token of the sequence enters or leaves (`first = x[:, 0]` before a graph break), or that
  writes to one, runs function by function: it is a view on one device, and shows what is written to `x` later.
- The preflight compares the step, run without the compiler.

## Rules

`python -m tools.rules_table` writes what follows, from `lightning_sp/global_view/table.py`. Names are those of
functions and methods alike; operators and in-place forms go with them.
"""


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for title, (room, what) in ROOMS.items():
        by_rule: dict[Rule, list[str]] = defaultdict(list)
        for name, rule in room.RULES.items():
            by_rule[rule].append(name)
        lines += [f"### {title}", "", what, "", "| functions | what is done |", "|---|---|"]
        for rule, names in by_rule.items():
            what_it_does = (inspect.getdoc(_owner(rule)) or "").splitlines()[0]
            lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {what_it_does} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _owner(rule: Rule) -> object:
    """Return what a rule's line is written at: of a reduction what it is over the sequence."""
    return next((cell.cell_contents for cell in rule.__closure__ or () if callable(cell.cell_contents)), rule)


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"wrote {TARGET}")
