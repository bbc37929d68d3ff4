"""What a batch holds: its entries by name, which of them carry a sequence, and which one: an encoder-decoder batch holds two.

    input_ids, attention_mask, ...                               one sequence, or the encoder's
    decoder_input_ids, decoder_..., and then labels, targets     the decoder's
    input_features, attention_mask, ... beside a decoder's       no sequence: sounds or images, which the encoder reads whole

Names that begin with "decoder_" are the decoder's, Hugging Face's standard names or declared ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sp.batch_structure import entries_of
from lightning_sp.data.batch.contents.media import is_of_media
from lightning_sp.data.batch.contents.ragged_rows import refuse_ragged_rows
from lightning_sp.data.batch.contents.targets import TARGET_NAMES
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX

DECODER = "decoder_"
# Standard names -> (dimension of the sequence, value of padding). Hugging Face's, nanoGPT's, torchtune's and TRL's.
STANDARD_NAMES: dict[str, tuple[int, float | int]] = {
    "input_ids": (1, 0),
    "inputs_embeds": (1, 0.0),
    "tokens": (1, 0),
    "labels": (1, IGNORE_INDEX),
    "shift_labels": (1, IGNORE_INDEX),
    "targets": (1, IGNORE_INDEX),
    "position_ids": (1, 0),
    "input_pos": (1, 0),
    "attention_mask": (1, 1),
    "token_type_ids": (1, 0),
    "loss_mask": (1, 0),
    "completion_mask": (1, 0),
    "target_mask": (1, 0),
    "loss_weights": (1, 0.0),
    "seq_idx": (1, 0),
    "mm_token_type_ids": (1, 0),
    "decoder_input_ids": (1, 0),
    "decoder_inputs_embeds": (1, 0.0),
    "decoder_position_ids": (1, 0),
    "decoder_attention_mask": (1, 1),
}
OF_TARGETS = ("labels", *TARGET_NAMES, "loss_mask")
INPUTS = ("input_ids", "inputs_embeds", "tokens")
TARGET_WEIGHTS = ("target_mask", "loss_weights")
_MASK = "attention_mask"


def is_no_structure(batch: Any) -> bool:
    """Return whether a batch is no structure of tensors, or of others: a number, a text, an object of the user's."""
    return entries_of(batch) is None


def plain_entries(batch: Any) -> dict[str, Any]:
    """Return a batch's entries by name, a tuple's by index, those of batches within it too: `batch_structure.entries_of`.

    Raises:
        SequenceParallelError: it holds no tensors.
    """
    if (found := entries_of(batch)) is not None:
        return _of_one_shape(found)
    raise SequenceParallelError(
        f"a batch of type {type(batch).__name__} cannot be sharded: no attribute of it is a tensor; it must be a mapping, tuple, list, "
        "dataclass or another object of tensors, or a tensor; return a dict from the collate function, or shard by hand and pass "
        "shard_batch=False"
    )


def _of_one_shape(entries: dict[str, Any]) -> dict[str, Any]:
    if nested := [name for name, value in entries.items() if isinstance(value, Tensor) and value.is_nested]:
        raise SequenceParallelError(
            f"the batch's entries {nested} are nested tensors, whose rows have different lengths: a rank's tokens are the same columns of "
            "every row; pad the rows (attention_mask), or pack them into one sequence with position_ids that start again"
        )
    return entries


def batch_entries(batch: Any, options: ShardOptions) -> dict[str, Any]:
    """Return a whole batch's entries by name, with the decoder's inputs that its model would make of the labels or ids, and their mask.

    Made of a shard's they would lack a token at each edge.
    """
    entries = plain_entries(batch)
    given = any(isinstance(entries.get(f"{DECODER}{name}"), Tensor) for name in ("input_ids", "inputs_embeds"))
    source = entries.get(options.decoder_inputs_of)
    if options.decoder_inputs is not None and not given and isinstance(source, Tensor):
        made = entries[f"{DECODER}input_ids"] = options.decoder_inputs(source)
        if options.decoder_hides is not None and not isinstance(entries.get(f"{DECODER}{_MASK}"), Tensor):
            entries[f"{DECODER}{_MASK}"] = (made != options.decoder_hides).to(made.dtype)
    return entries


def sequence_dims(entries: Mapping[str, Any], options: ShardOptions) -> dict[str, int]:
    """Return the dimension of the sequence in each entry that carries one.

    Raises:
        SequenceParallelError: there is none, or a declared one that the batch does not have, or the model cannot take one on shards.
    """
    if options.unreachable:
        raise SequenceParallelError(options.unreachable)
    dims = named_dims(entries, options)
    _refuse_several_batches(entries, options.sequence_dims)
    refuse_ragged_rows(entries, dims, STANDARD_NAMES)
    short = [n for n, d in dims.items() if entries[n].dim() <= d]
    if not dims or short:
        raise SequenceParallelError(
            f"the batch has no sequence dimension{f' in {short}' if short else ''}: it holds {shapes_of(entries) or 'nothing'}; known names are "
            f"{', '.join(STANDARD_NAMES)} with the sequence along dim 1; name others by sequence_dims={{'name': dim}} (tuples by index, "
            "{'0': 1, '1': 1}), say sequence_dims={} if none of them is a sequence, shard by hand and pass shard_batch=False, or train without "
            "splitting sequences: sequence_parallel_size=1"
        )
    if sparse := [n for n in dims if entries[n].layout != torch.strided]:
        raise SequenceParallelError(
            f"the batch's entries {sparse} are sparse tensors of the sequence ({shapes_of({n: entries[n] for n in sparse})}), which are "
            "not cut along it: give them dense (entry.to_dense()) from the collate function, and make them sparse in the step"
        )
    if empty := [n for n, d in dims.items() if 0 in (entries[n].shape[0], entries[n].shape[d])]:
        raise SequenceParallelError(
            f"the batch holds no tokens in {empty}: it holds {shapes_of(entries)}, and a mean over none is not a number; leave empty rows "
            "and batches out, in the dataset or the collate function"
        )
    return dims


def named_dims(entries: Mapping[str, Any], options: ShardOptions) -> dict[str, int]:
    """Return the dimension of the sequence in each entry of a known or declared name; empty where there is none.

    Others come with them where `options.infer_sequences` allows, or no sequence is split: what a trial's crop cuts them by.

    Raises:
        SequenceParallelError: the batch lacks a declared one, and has another that may be meant by it.
    """
    known = {n: t for n, t in entries.items() if n in STANDARD_NAMES and isinstance(t, Tensor)}
    # A mask of queries and keys passes whole: the model hands it to its attention as it is. So do labels and weights of rows, one for each,
    # and those of several classes at once: numbers, not tokens, of another length than the tokens.
    lengths = {t.shape[1] for n, t in known.items() if n in INPUTS and t.dim() > 1}
    whole = [
        n
        for n, t in known.items()
        if (n.endswith("attention_mask") and (t.dim() == 4 or (t.dim() == 3 and t.shape[1] == t.shape[2] > 1)))
        or (n in OF_TARGETS and t.dim() == 1)
        or (n in OF_TARGETS and t.dim() == 2 and t.is_floating_point() and lengths and t.shape[1] not in lengths)
        or (n in TARGET_WEIGHTS and (t.dim() == 1 or t.shape[1] == 1))
    ]
    whole += inputs_of_whole_encoder(entries, options)
    several = _shape_of_several_texts(known)
    dims = {n: 2 if t.shape == several else STANDARD_NAMES[n][0] for n, t in known.items() if n not in whole}
    dims |= dict.fromkeys(_targets_of_codebooks(known), 2)
    for name, dim in options.sequence_dims.items():
        tensor = entries.get(name)
        if tensor is None and not _may_be_misspelt(dim, entries, options):
            continue  # of other batches
        if not isinstance(tensor, Tensor) or not -tensor.dim() <= dim < tensor.dim():
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise SequenceParallelError(
                f"sequence_dims[{name!r}]={dim}: the batch has {shape} there; it has {shapes_of(entries)}"
            )
        dims[name] = dim % tensor.dim()  # -1 is the last one, as everywhere in torch
    if options.infer_sequences or (dims and not options.is_split):
        return {**dims, **inferred_dims(entries, dims, options.whole_entries)}
    found = {n: d for n, d in options.inferred_dims.items() if isinstance(t := entries.get(n), Tensor) and t.dim() > d}
    return {**(_of_one_length(entries, found, dims) if options.global_view else found), **dims}


def _of_one_length(entries: Mapping[str, Any], inferred: Mapping[str, int], known: Mapping[str, int]) -> dict[str, int]:
    """Return the inferred ones that are as long as the sequence: in the first batch others were by chance, and pass whole."""
    if known:
        lengths = {entries[name].shape[dim] for name, dim in known.items() if entries[name].dim() > dim}
    else:
        lengths = {tensor.shape[dim] for tensor, dim in _leading([entries[name] for name in inferred])[:1]}
    return {n: d for n, d in inferred.items() if not lengths or entries[n].shape[d] in lengths}


def _may_be_misspelt(dim: int, entries: Mapping[str, Any], options: ShardOptions) -> bool:
    """Return whether a batch without a declared entry has one of no known name that it may stand for."""
    known = {*STANDARD_NAMES, *options.sequence_dims, *options.inferred_dims}
    others = [t.dim() for n, t in entries.items() if n not in known and isinstance(t, Tensor)]
    return not known & entries.keys() or any(-each <= dim < each for each in others)


def _shape_of_several_texts(known: Mapping[str, Tensor]) -> torch.Size | None:
    """Return the shape of ids of (rows, texts, tokens), answers to choose from say: the last dim is the longer one. None where a row is one."""
    ids = [known[name] for name in INPUTS if name in known and not known[name].is_floating_point()]
    return next((each.shape for each in ids if each.dim() == 3 and each.shape[2] > each.shape[1]), None)


def _targets_of_codebooks(known: Mapping[str, Tensor]) -> list[str]:
    """Return targets of (rows, codebooks, tokens) beside a decoder's inputs of (rows, tokens, codebooks), as Dia has them."""
    codes = known.get(f"{DECODER}input_ids")
    if codes is None or codes.dim() != 3:
        return []
    rows, tokens, codebooks = codes.shape
    return [n for n in OF_TARGETS if n in known and tuple(known[n].shape) == (rows, codebooks, tokens)]


def inputs_of_whole_encoder(entries: Mapping[str, Any], options: ShardOptions) -> list[str]:
    """Return what an encoder reads that has no sequence in the batch, sounds or images and their mask; empty where it has one, or no decoder.

    How many tokens it makes of them is its own affair: they pass whole.
    """
    names = {n for n, t in entries.items() if n in {*STANDARD_NAMES, *options.sequence_dims} and isinstance(t, Tensor)}
    of_decoder = {n for n in names if n.startswith(DECODER)}
    if not of_decoder or names - of_decoder - {*OF_TARGETS, *TARGET_WEIGHTS, _MASK}:
        return []
    media = {n: t for n, t in entries.items() if is_of_media(n, t) and n not in names}
    if not any(t.is_floating_point() for t in media.values()):
        return []
    # Whole numbers of (rows, tokens) may be the decoder's own, whatever they are called.
    return [*(n for n, t in media.items() if t.is_floating_point() or t.dim() > 2), *({_MASK} & names)]


def inferred_dims(entries: Mapping[str, Any], known: Mapping[str, int], whole: Collection[str] = ()) -> dict[str, int]:
    """Return the dimension of the sequence in entries of other names, tuples' too: those of as many rows and tokens as the known ones.

    Where none is known, the sequence is that of the first integers of (rows, tokens); else of the first numbers of (rows, tokens, features),
    or of (rows, codebooks, tokens) where they are integers and the last dim is the longer one; else of the first series, (rows, numbers)
    or (rows, numbers, 1), or of one channel, (rows, 1, numbers).
    What has the tokens in a further dimension too is a mask of queries and keys, say, and stays unknown. So does everything beside a
    decoder's sequence, for it may belong to either.

    Args:
        entries: of the batch.
        known: those of known and declared names.
        whole: entries that are none.
    """
    if any(name.startswith(DECODER) for name in known):
        return {}
    told = {*STANDARD_NAMES, *known, *whole}
    others = {n: t for n, t in entries.items() if n not in told and isinstance(t, Tensor)}
    leading = [(entries[name], dim) for name, dim in known.items() if dim == 1 and entries[name].dim() > 1]
    if not known:
        leading = _leading([*others.values()])
    if not leading:
        return {}
    first, dim = leading[0]
    rows, length = first.shape[0], first.shape[dim]
    if length == 1:
        return {}
    found = {n: 1 for n, t in others.items() if tuple(t.shape[:2]) == (rows, length) and length not in t.shape[2:]}
    return found if dim == 1 else {**found, **{n: dim for n, t in others.items() if t.shape == first.shape}}


def _leading(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Return what may be a batch's sequence where no name is known, the likeliest first, with the dimension of its tokens."""
    numbers = [t for t in tensors if t.dtype != torch.bool and t.shape[1:] and min(t.shape[1:]) > 1]
    ids = [(t, 1) for t in numbers if t.dim() == 2 and not t.is_floating_point()]
    features = [(t, 2 if not t.is_floating_point() and t.shape[2] > t.shape[1] else 1) for t in numbers if t.dim() == 3]
    series = [(t, 1) for t in tensors if _is_series(t)]
    return ids + features + series + [(t, 2) for t in tensors if _is_one_channel(t)]


def _is_series(tensor: Tensor) -> bool:
    """Return whether a tensor is (rows, numbers), or (rows, numbers, 1) as forecasts of one feature have it."""
    shape = tensor.shape[1:-1] if tensor.dim() == 3 and tensor.shape[2] == 1 else tensor.shape[1:]
    return tensor.is_floating_point() and len(shape) == 1 and shape[0] > 1


def _is_one_channel(tensor: Tensor) -> bool:
    """Return whether a tensor is (rows, 1, numbers): nothing but its last dim can be split."""
    return tensor.is_floating_point() and tensor.dim() == 3 and tensor.shape[1] == 1 < tensor.shape[2]


def sequence_in_last_dim(entries: Mapping[str, Any], inferred: Mapping[str, int], known: Mapping[str, int]) -> str:
    """Return a line for a refusal of a batch that was split by its shapes alone, where the sequence may be the last dim; else empty.

    Args:
        entries: of the batch.
        inferred: of `inferred_dims`.
        known: the dims of known and declared names.
    """
    found = {n: d for n, d in inferred.items() if d == 1 and entries[n].dim() == 3 and entries[n].is_floating_point()}
    if known or not found:
        return ""
    name, shape = next((n, tuple(entries[n].shape)) for n in found)
    return (
        f"By its shape alone {name} of {shape} was taken for {shape[1]} tokens of {shape[2]} features each; where the last dim is the sequence "
        f"(channels, then time), say sequence_dims={dict.fromkeys(found, 2)}"
    )


def split_sequences(dims: Mapping[str, int], whole_inputs: Sequence[str] = ()) -> tuple[dict[str, int], dict[str, int]]:
    """Return the dimensions of the sequence that is trained on and of the encoder's: none where the batch holds one sequence.

    Args:
        dims: of all entries that carry a sequence.
        whole_inputs: of `inputs_of_whole_encoder`.

    Raises:
        SequenceParallelError: a decoder's, and nothing that an encoder reads.
    """
    if not any(name.startswith(DECODER) for name in dims) or whole_inputs:
        return dict(dims), {}
    decoder = {n: d for n, d in dims.items() if n.startswith(DECODER) or n in OF_TARGETS}
    encoder = {n: d for n, d in dims.items() if n not in decoder}
    if not encoder:
        raise SequenceParallelError(
            f"the batch has {', '.join(decoder)}, which are a decoder's, and nothing that an encoder reads: give its sequence, input_ids or a "
            "name in sequence_dims, or its sounds or images as input_features, input_values or pixel_values, or, for a model of one sequence, "
            f"drop {DECODER!r} from the names"
        )
    return decoder, encoder


def pairs_of_tokens(entries: Mapping[str, Any], dims: Mapping[str, int], options: ShardOptions) -> list[str]:
    """Return the entries that hold something for each two tokens, masks or distances say, and pass whole: (rows, S, S, ...), or (S, S).

    On a rank's part those of (rows, S, S, ...) may be sequences of S features, and are left out.

    Args:
        entries: of the batch.
        dims: of the entries that carry a sequence.
        options: of sharding.
    """
    lengths = {int(entries[name].shape[dim]) for name, dim in dims.items()} - {1}
    rows = {int(entries[name].shape[0]) for name, dim in dims.items() if dim > 0}
    others = {n: t for n, t in entries.items() if n not in dims and isinstance(t, Tensor) and t.layout == torch.strided}
    found = [n for n, t in others.items() if t.dim() == 2 and lengths.issuperset(t.shape) and t.shape[0] not in rows]
    if options.global_view:
        found += [
            n for n, t in others.items() if t.dim() > 2 and t.shape[0] in rows and lengths.issuperset(t.shape[1:3])
        ]
    return found


def extent(entries: Mapping[str, Any], dims: Mapping[str, int], others: Iterable[str] = ()) -> tuple[int, int]:
    """Return (rows, tokens) of a sequence.

    Args:
        entries: of the batch.
        dims: of the sequence.
        others: entries of the batch's other sequence, or what its encoder reads whole.

    Raises:
        SequenceParallelError: its entries differ in length, or another one looks as if it belonged to it.
    """
    lengths = {n: int(entries[n].shape[d]) for n, d in dims.items()}
    if len(set(lengths.values())) > 1:
        raise SequenceParallelError(
            f"the batch's sequences have different lengths {lengths}: they must be equal to be split alike; an encoder-decoder batch names its "
            f"decoder's {DECODER}input_ids, or {DECODER}... in sequence_dims, and then labels are the decoder's too (rename what begins with "
            f"{DECODER} and is none)"
        )
    known = {*dims, *others}
    name, dim = next(iter(dims.items()))
    rows = int(entries[name].shape[0]) if dim > 0 else 1
    length = lengths[name]
    unknown = {
        n: tuple(t.shape)
        for n, t in entries.items()
        if n not in known
        and isinstance(t, Tensor)
        and t.dim() > 1
        and t.shape[0] == rows
        and t.shape[1] == length
        and length > 1
    }
    if unknown:
        pairs = [name for name, shape in unknown.items() if shape[1:3] == (length, length)]
        of_pairs = f"; if {', '.join(pairs)} {'is' if len(pairs) == 1 else 'are'} of pairs of tokens, global_view=True carries it whole"
        raise SequenceParallelError(
            f"{unknown} of the batch look like sequences of {length} tokens, but their names are not known: passing them whole would be "
            f"silently wrong{of_pairs if pairs else ''}; say sequence_dims={{{', '.join(f'{n!r}: 1' for n in unknown)}}}, or rename them; where "
            f"one is no sequence, and as long by chance, give it another dim 1 in the collate function: {next(iter(unknown))}.unsqueeze(1)"
        )
    return rows, length


def shapes_of(entries: Mapping[str, Any]) -> str:
    """Return the names and shapes of a batch's entries, for errors."""
    return ", ".join(
        f"{n}: {tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__}" for n, t in entries.items()
    )


def _refuse_several_batches(entries: Mapping[str, Any], declared: Mapping[str, int]) -> None:
    """Refuse batches within a batch that have a known name in common, if none of them is declared: nothing says how they count."""
    nested = [name.rpartition(".") for name in entries if "." in name]
    common = sorted({of for of, _, name in nested if name in STANDARD_NAMES})
    if len(common) > 1 and not any(name in declared for name in entries if "." in name):
        raise SequenceParallelError(
            f"the batch holds batches of its own, {', '.join(map(repr, common))} (several training loaders at once give those): a step "
            "that sees its rank's part has one sequence; global_view=True carries them, one loader over a "
            "torch.utils.data.ConcatDataset is faster; or say "
            f"sequence_dims={{{', '.join(f'{name!r}: 1' for name in entries if '.' in name)}}}"
        )
