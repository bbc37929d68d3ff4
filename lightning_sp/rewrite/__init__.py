"""Getting the attention into a model from outside, never by editing its code."""

from lightning_sp.rewrite.flex import FlexInterception
from lightning_sp.rewrite.hugging_face.encoders.encoder_decoder import (
    decoder_inputs,
    hidden_decoder_token,
    row_end,
    source_of_decoder_inputs,
)
from lightning_sp.rewrite.hugging_face.interface import HuggingFaceRewrite
from lightning_sp.rewrite.hugging_face.media.placement import placeholder_ids
from lightning_sp.rewrite.hugging_face.models import hugging_face_models, why_unreachable
from lightning_sp.rewrite.hugging_face.virtual_tokens import num_virtual_tokens, why_no_virtual_tokens
from lightning_sp.rewrite.row_dropout import RowDropoutInterception
from lightning_sp.rewrite.sdpa import SdpaInterception
from lightning_sp.rewrite.staged_heads import StagedHeads
from lightning_sp.rewrite.whole_attention import WholeAttention

__all__ = [
    "FlexInterception",
    "HuggingFaceRewrite",
    "RowDropoutInterception",
    "SdpaInterception",
    "StagedHeads",
    "WholeAttention",
    "decoder_inputs",
    "hidden_decoder_token",
    "hugging_face_models",
    "num_virtual_tokens",
    "placeholder_ids",
    "row_end",
    "source_of_decoder_inputs",
    "why_no_virtual_tokens",
    "why_unreachable",
]
