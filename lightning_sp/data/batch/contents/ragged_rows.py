"""Lists of rows in a batch, {"input_ids": [row, row]}: rows of one length each would have to be split alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_sp.errors import SequenceParallelError


def refuse_ragged_rows(
    entries: Mapping[str, Any], dims: Mapping[str, int], standard: Mapping[str, tuple[int, float | int]]
) -> None:
    """Refuse a list of rows.

    Beside a tensor of rows a list of another name is left whole: the classes of what is in each picture, a row's spans.

    Args:
        entries: of a batch, by name; those of a list by their place in it.
        dims: along which dimension those of a known name carry the sequence.
        standard: known names -> (dimension of the sequence, value of padding).

    Raises:
        SequenceParallelError: there is one.
    """
    rows: dict[str, list[Tensor]] = {}
    has_rows = False
    for name, value in entries.items():
        of, _, index = name.rpartition(".")
        is_in_list = bool(of) and index.isdigit()
        has_rows |= not is_in_list and isinstance(value, Tensor) and value.dim() > 1
        if is_in_list and name not in dims and isinstance(value, Tensor) and value.dim() == 1:
            rows.setdefault(of, []).append(value)
    refused = [name for name in rows if not has_rows or name.rpartition(".")[2] in standard]
    if not refused:
        return
    name = refused[0]
    found, (_, fill) = rows[name], standard.get(name.rpartition(".")[2], (1, 0))
    raise SequenceParallelError(
        f"the batch's {name!r} is a list of {len(found)} rows, of {[len(row) for row in found]} tokens: a list of rows is not split; pad them "
        "to one tensor in the collate function: rows = torch.nn.utils.rnn.pad_sequence([sample[...] for sample in samples], batch_first=True, "
        f"padding_value={fill}) and attention_mask = pad_sequence([torch.ones(len(sample[...])) for sample in samples], batch_first=True); "
        "transformers' DataCollatorForLanguageModeling and DataCollatorForSeq2Seq do both"
    )
