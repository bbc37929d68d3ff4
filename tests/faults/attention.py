"""Faults of masks, positions, the ring and the kernels."""

from __future__ import annotations

from tests.faults.fault import KERNELS, LAW, NOT_CARRIED, PACKED, REWRITTEN, fault

ATTENTION = (
    fault(
        "document boundaries ignored",
        "context.py",
        "return AttentionMask(causal, boundaries, window_size,",
        "return AttentionMask(causal, None, window_size,",
        PACKED,
    ),
    fault(
        "our own padding attended to",
        "context.py",
        "if boundaries is None and self.padded_length > self.length and not causal:",
        "if False:",
        REWRITTEN,
    ),
    fault(
        "our own padding joined to the last document",
        "data/batch.py",
        "return torch.cat([boundaries, torch.full((boundaries.shape[0], 1), padded)], 1)",
        "return torch.cat([boundaries[:, :-1], torch.full((boundaries.shape[0], 1), padded)], 1)",
        "tests/unit/test_mask.py::test_padding_is_a_document_of_its_own[False-position_ids1-boundaries1]",
    ),
    fault(
        "padding mask of the batch dropped",
        "data/batch.py",
        'valid, seen = _valid_keys(entries["attention_mask"]) if mask_given else (None, None)',
        "valid, seen = None, None",
        REWRITTEN,
    ),
    fault(
        "padding mask of the model dropped",
        "rewrite/hugging_face.py",
        "hides_padding=hides)",
        "hides_padding=False)",
        REWRITTEN,
    ),
    fault(
        "mask of a shard taken for the whole",
        "rewrite/explicit_mask.py",
        "    if keys in whole and queries in (1, *whole)",
        "    if keys in (local, *whole) and queries in (1, local, *whole)",
        NOT_CARRIED,
    ),
    fault(
        "sliding window trained as full causal",
        "rewrite/hugging_face.py",
        "sizes = {part.name: part.size for part in sized}",
        "sizes: dict[str, Any] = {}",
        REWRITTEN,
    ),
    fault(
        "window passed to each ring block",
        "attention/intervals.py",
        "return _count(keys, piece.low + piece.low_step * (i - piece.start))",
        "return _count(keys, piece.low)",
        f"{LAW}[32-2]",
    ),
    fault(
        "a window one token too wide",
        "rewrite/hugging_face.py",
        "None if left is None else left - 1",
        "left",
        REWRITTEN,
    ),
    fault(
        "what lies before a window read as what lies in it",
        "attention/block.py",
        "return out.flip(2), lse.flip(2)",
        "return out, lse",
        f"{LAW}[32-1]",
    ),
    fault(
        "ring backward with stale keys",
        "attention/ring.py",
        "        received = transfer.wait()\n        transfer = ring.start_keys(hop_kv, hop + 1)",
        "        arrived = transfer.wait()\n"
        "        received = stale if hop > 1 and stale.shape == arrived.shape else arrived\n"
        "        stale = received\n"
        "        transfer = ring.start_keys(hop_kv, hop + 1)",
        f"{LAW}[32-4]",
    ),
    fault(
        "dK and dV without the ring's last hop",
        "attention/ring.py",
        "    _add_home(dkv, homeward)\n    home_dk",
        "    assert homeward is not None\n    homeward[0].wait()\n    home_dk",
        f"{LAW}[32-2]",
        f"{LAW}[32-4]",
    ),
    fault(
        "dK and dV added to other tokens than they came from",
        "attention/ring.py",
        "dkv[start:end] += part",
        "dkv[: end - start] += part",
        f"{LAW}[32-4]",
    ),
    fault(
        "dK and dV from each other's buffer",
        "attention/ring.py",
        "    home_dk, home_dv = _unpack(dkv)\n",
        "    home_dv, home_dk = _unpack(dkv)\n",
        f"{LAW}[32-2]",
    ),
    fault(
        "zigzag positions not given",
        "data/batch.py",
        "local_positions = shard(position_ids, layout, rank, dim=1)",
        "local_positions = shard(position_ids, SequenceLayout(1, layout.size), rank, dim=1)",
        PACKED,
    ),
    fault(
        "positions not given to a Hugging Face model",
        "rewrite/hugging_face.py",
        'if kwargs.get("position_ids") is None and positions is not None:',
        "if False:",
        REWRITTEN,
    ),
    fault(
        "lse kept in bfloat16 between hops",
        "attention/ring.py",
        "        transfer = following\n    assert running",
        "        transfer = following\n"
        "        assert running is not None\n"
        "        running = (running[0], running[1].to(q.dtype).to(running[1].dtype))\n"
        "    assert running",
        "tests/dist/test_attention_precision.py::test_bfloat16_error_is_at_most_twice_the_unsharded_kernels[True-1x4]",
    ),
    fault(
        "lse kept in bfloat16 for the backward",
        "attention/ring.py",
        "    return out.to(q.dtype), lse\n",
        "    return out.to(q.dtype), lse.to(q.dtype).to(lse.dtype)\n",
        "tests/dist/test_attention_precision.py::test_bfloat16_error_is_at_most_twice_the_unsharded_kernels[True-1x4]",
    ),
    fault(
        "attention dropout by degrees",
        "rewrite/functional.py",
        "    if probability:\n",
        "    if False:\n",
        NOT_CARRIED,
    ),
    fault(
        "dropout drawn again in the recomputation",
        "parallelize/checkpointing.py",
        "use_reentrant=False, context_fn=_contexts, **kwargs",
        "use_reentrant=False, preserve_rng_state=False, context_fn=_contexts, **kwargs",
        "tests/trainer/test_fit.py::test_recomputation_draws_the_forwards_dropout_again",
    ),
    fault(
        "causal ignored by the kernel",
        "attention/kernel.py",
        "_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)",
        "_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)",
        f"{LAW}[32-1]",
    ),
    fault(
        "causal ignored by the kernel's backward",
        "attention/kernel.py",
        "grad, q, k, v, out, lse, 0.0, causal, scale=scale\n",
        "grad, q, k, v, out, lse, 0.0, False, scale=scale\n",
        f"{LAW}[32-1]",
    ),
    fault(
        "causal ignored by the CUDA kernel",
        "attention/kernel.py",
        "q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale",
        "q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False, scale=scale",
        f"{KERNELS}::test_causal_reaches_the_cuda_operators[True]",
    ),
    fault(
        "causal ignored by the CUDA kernel's backward",
        "attention/kernel.py",
        "q.shape[1], k.shape[1], 0.0, causal, rng,",
        "q.shape[1], k.shape[1], 0.0, False, rng,",
        f"{KERNELS}::test_causal_reaches_the_cuda_operators[True]",
    ),
    fault(
        "causal ignored by flash-attn",
        "attention/kernel.py",
        "q, k, v, 0.0, scale, causal=causal,",
        "q, k, v, 0.0, scale, causal=False,",
        f"{KERNELS}::test_causal_reaches_flash_attn_and_no_window_does[True]",
    ),
    fault(
        "causal ignored by flash-attn's backward",
        "attention/kernel.py",
        "            causal,\n            -1,\n            -1,\n            self.softcap,",
        "            False,\n            -1,\n            -1,\n            self.softcap,",
        f"{KERNELS}::test_causal_reaches_flash_attn_and_no_window_does[True]",
    ),
    fault(
        "causal ignored by the rewrite",
        "rewrite/functional.py",
        "self.context.step.masks[is_causal]",
        "self.context.step.masks[True]",
        REWRITTEN,
    ),
)
