"""How small each field of a configuration becomes, by its name; and what single model types need besides.

A rule is a pattern of names and the largest number that it leaves. A field that is smaller already keeps its default, None stays None.
Everything of one kind has one size (hidden 64 of 4 heads of 16), so that the parts of a composite model fit together.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_DIM = 64, 4, 2, 16
VOCABULARY = 96
# Random tokens are drawn from here: below are padding, begin and end, above are the tokens of images and such.
FIRST_TOKEN, END_OF_TOKENS = 8, 80
# The label of a token without a target.
IGNORED = -100

# The first pattern that matches a whole name decides.
_AT_MOST = [
    (r"max_window_layers|num_mem_blocks|first_k_dense_replace|num_dense_layers|n_layers_per_attn_res_block|moe_layer_start_index", 1),
    (r"aligner_num_add_layers", 1),
    (r"num_kv_shared_layers|num_mtp_layers|num_nextn_predict_layers", 0),
    (r".*(layer_period|_every_n_layers|layer_interval|layer_group_size|window_pattern|sparse_step|_layer_step)", 2),
    (r"cross_attention_frequency|cross_attn_k", 2),
    (r".*layer_offset|insert_layer_id", 1),
    (r"(.*_)?layers|n_layer|.*_layer|.*depth|num_blocks|num_sparse_\w+_layers", 2),
    (r"num_self_attends_per_block|[HL]_cycles|num_latents|n_latents|resampler_n_latents|latent_query_num", 2),
    (r".*(key_value|kv)_heads|.*linear_num_key_heads|num_query_groups", KEY_VALUE_HEADS),
    (r"(.*_)?(attention_heads|n_heads?|num_heads|num_attn_heads)|index_n_heads|.*linear_num\w*_heads|.*_heads", HEADS),
    (r"qk_(nope|rope)_head_dim|rotary_dim", 8),
    (r".*(head_dim|dim_head)|d_kv|d_head|attention_head_size|kv_channels|d_rel|.*head_size", HEAD_DIM),
    (r".*lora_rank|.*_rank|hc_lowrank|index_topk|dim_model_base", 16),
    (r"(.*_)?vocab_size.*|encoder_hash_byte_group_vocab|.*_vocab|num_embeds", VOCABULARY),
    (r"num_embeddings|codebook_size|upsample_groups", 64),
    (r"num_filters", 4),
    (r"vision_output_dim|projector_input_dim", 4 * HIDDEN),
    (r"moe_intermediate_size|.*expert\w*_intermediate_size|.*expert_ffn_hidden_size|expert_dim|share_expert_dim|moe_hidden_size", 32),
    (r"(.*_)?(intermediate_size\w*|ffn_dim|ffn_hidden_size|d_ff|n_inner|hidden_dim|dff|mlp_dim|dim_ff|feed_forward_size|d_inner)", 96),
    (r"attention_window|sliding_window(_size)?|attention_window_size|local_attention|attention_chunk_size|local_attention_window_len", 8),
    (r"keep_window_size|local_radius|global_block_size|window_size|block_size", 8),
    (r"(.*_)?(num|n)_(routed_|local_)?experts|num_local_experts|n_routed_experts|zero_expert_num", 4),
    (r".*(experts_per_tok|moe_topk|moe_k|moe_top_k)|top_k|topk|n_group", 2),
    (r"topk_group|n?_?\w*shared_experts|n_groups|.*mamba_n_groups", 1),
    (r"expert_capacity", 64),
    # From so many tokens on something happens: fewer than a batch has.
    (r"index_block_size|index_kpool|floor_scale|log_scaling_n_floor|canvas_length", 8),
    (r"index_topk_blocks|index_local_blocks", 1),
    (r"(mamba_d_)?state(_size)?|ssm_state_size|(mamba_)?chunk_size", 8),
    (r"mamba_d_ssm|mamba_expand_dim", 2 * HIDDEN),
    (r"mamba_(n|num)_heads", 8),
    (r"(.*_)?(num_)?(max_)?((source|target|speech|text)_positions|position_embeddings|n_positions|n_ctx|seq_len|context_length)", 128),
    (r"n_positions|n_ctx|max_seq_len|rel_extent", 128),
    (r"num_position_embeddings|position_embedding_size", 16),
    (r"(pos_emb|posemb)_(height|width|grid_size)|pos_emb_time", 4),
    (r"patch_size", 8),
    (r"image_size|crop_size|resolution|img_size", 32),
    (r"(.*_)?(hidden_size\w*|d_model|n_embd|embed_dim|emb_dim|dim|embedding_size|width|input_dim|output_dim|proj\w*_dim)", HIDDEN),
    (r"adapter_input_size", HIDDEN),
    (r"(.*_)?(base_channels|latent_channels|conv_channels|channel_size|latents|projection_size|classifier_proj_size|units)", 16),
]  # fmt: skip
AT_MOST = [(re.compile(pattern), most) for pattern, most in _AT_MOST]
# Widths of a stack of convolutions, one after the other.
STACKS = {
    "conv_dim": 16,
    "tdnn_dim": 16,
    "hidden_sizes": HIDDEN,
    "depths": 2,
    "num_attention_heads": HEADS,
    "image_size": 32,
}
# Random in training, or larger than it need be.
OFF = re.compile(
    r".*drop(out|_rate|_path_rate|_prob|_path)?\w*|.*pdrop|.*_drop|mask_(time|feature)_prob|router_jitter_noise|input_jitter_noise|.*noise_std|.*layerdrop"
)
SWITCHED_OFF = {"apply_spec_augment": False, "use_cache": False, "tie_encoder_decoder": False}
# Numbers with such names are tokens.
TOKEN = re.compile(r".*(_token_id|_token_index|_token|_index|_id)")
NO_TOKEN = {"lang_id", "altup_active_idx"}

# Kept whole, whatever a rule says of the name.
KEPT = {"router_aux_loss_coef", "initializer_range", "num_labels", "type_vocab_size"}

# Three axes of positions share the 16 numbers of a head.
_THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_HALF_A_HEAD = {**_THREE_AXES, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
_GEMMA4_VISION = {
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM, "patch_size": 8, "position_embedding_size": 16,
}  # fmt: skip
# Heads of eight numbers, and windows that are smaller than the picture.
_SWIN = {"embed_dim": 24, "depths": [2, 2, 2], "num_heads": [3, 6, 12], "window_size": 2}
# A budget of fewer tokens than a batch has.
_INDEXER = {
    "indexer_budget": 8, "indexer_compress_ratio": 4, "indexer_n_heads": HEADS, "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
}  # fmt: skip
# What one type needs beside the rules, by the path of the field.
OVERRIDES: dict[str, dict[str, Any]] = {
    # The codes of images and of sounds are tokens behind those of the text.
    "apertus1p5": {
        "text_config.vocab_size": 2 * VOCABULARY, "image_token_offset": 100, "vision_config.codebook_size": 40, "audio_token_offset": 140,
        "audio_config.codebook_size": 40, "audio_config.codebook_dim": HIDDEN, "vision_config.base_channels": 32,
    },
    "bit": {"num_groups": 8},
    "blip-2": {"image_token_index": 90, "num_query_tokens": 4},
    "chameleon": {"vocabulary_map": {"<image>": 90, "IMGIMGAZ": 80, "IMGIMGBZ": 81}, "vq_config.base_channels": 32},
    "instructblip": {"image_token_index": 90, "num_query_tokens": 4},
    "instructblipvideo": {"num_query_tokens": 2, "video_token_index": 90},
    "janus": {"vq_config.base_channels": 32},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8, "input_size": 32},
    "led": {"attention_window": 16},
    "lilt": {"hidden_size": 48},
    "longformer": {"attention_window": 16},
    "lxmert": {"visual_feat_dim": HIDDEN},
    "cvt": {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    "donut-swin": _SWIN,
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
    "focalnet": {"embed_dim": 16, "hidden_sizes": [32, 64, 64, 64]},
    "hgnet_v2": {
        "stem_channels": [3, 16, 16], "stage_in_channels": [16, 32, 64, 64], "stage_mid_channels": [16, 16, 16, 16],
        "stage_out_channels": [32, 64, 64, 64], "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "hiera": {"embed_dim": 16, "depths": [1, 1, 2, 1], "image_size": [64, 64]},
    "levit": {"image_size": 64, "patch_size": 16},
    "mobilevitv2": {"image_size": 64, "width_multiplier": 0.25},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": _THREE_AXES}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _THREE_AXES}},
    "exaone4_5": {"vision_config.window_size": 32},
    "hyperclovax_vision_v2": {"vision_config.window_size": 32},
    "llava_next": {"image_grid_pinpoints": [[32, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "cosmos3_edge": {"text_config.rope_parameters": _THREE_AXES},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "moonshine": {"pad_token_id": 0},
    "cohere_asr": {"decoder_start_token_id": 1},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 90, "vision_config.window_size": 32, "text_config.rope_parameters": _THREE_AXES},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 90},
    "step3p7": {"text_config.sliding_window": 8},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0, "ffn_config.ffn_hidden_size": 96},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"], "text_config.num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note": {
        "text_config.per_layer_config": None, "vision_config.mlp_layer_types": ["dense", "sparse"],
        "vision_config.per_layer_config": None, "audio_config.feature_size": 32,
    },
    "dots3_note_text": {"per_layer_config": None},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "diffusion_gemma": {
        "text_config.num_experts": 4, "text_config.top_k_experts": 2, "text_config.moe_intermediate_size": 32,
        "text_config.global_head_dim": HEAD_DIM, "vision_config": _GEMMA4_VISION, "canvas_length": 22,
    },
    "encoder-decoder": {"decoder_start_token_id": 0, "pad_token_id": 0},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 5},
    "evolla": {
        "protein_encoder_config": {
            "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 96,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": VOCABULARY, "token_dropout": False,
        },
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "fun_asr_nano": {"adaptor_config.intermediate_size": HIDDEN // 4},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {"vision_config": _GEMMA4_VISION},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "gemma4_assistant": {"text_config.hidden_size_per_layer_input": 0, "text_config.vocab_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {
        "deepstack_layer_map": [[1, 0]], "spatial_target_layers": [1, 1, 1, 1], "downsample_rate": "1/2", "image_grid_pinpoints": [[32, 32]],
        "qformer_config.num_hidden_layers": 1,
    },
    "hy_v4_vl": {"text_config.rope_parameters": {**_THREE_AXES, "mrope_section": [2, 1, 1]}},
    "glm46v": {"text_config.rope_parameters": _THREE_AXES},
    "glm4v": {"text_config.rope_parameters": _THREE_AXES},
    "glm4v_moe": {"text_config.rope_parameters": _HALF_A_HEAD},
    "glm_ocr": {"text_config.rope_parameters": _THREE_AXES},
    "kyutai_speech_to_text": {"num_codebooks": 4},
    "pi0": {"chunk_size": 6, "vlm_config.image_token_id": 90},
    "pix2struct": {"vision_config.patch_embed_hidden_size": 768},
    "vision-encoder-decoder": {"decoder_start_token_id": 0, "pad_token_id": 0},
    "florence2": {
        "vision_config.depths": [1, 1, 1, 1], "vision_config.embed_dim": [16, 32, 64, 64], "vision_config.num_heads": [2, 4, 4, 4],
        "vision_config.num_groups": [2, 4, 4, 4], "vision_config.window_size": 2,
    },
    "vjepa2": {"frames_per_clip": 4},
    "moonshine_streaming": {"num_key_value_heads": HEADS, "pad_token_id": 0, "decoder_start_token_id": 1},
    "speech-encoder-decoder": {"decoder_start_token_id": 0, "pad_token_id": 0},
    "perceiver": {"max_position_embeddings": 30},
    "paddleocr_vl": {"text_config.rope_parameters": _THREE_AXES},
    "qwen2_5_vl": {"text_config.rope_parameters": _THREE_AXES, "vision_config.window_size": 32},
    "qwen4_exp": {f"text_config.{name}": value for name, value in _INDEXER.items()},
    "qwen4_exp_text": _INDEXER,
    "qwen2_vl": {"text_config.rope_parameters": _THREE_AXES},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {**_THREE_AXES, "mrope_section": [3, 3, 2]}},
    "hunyuan_vl": {"text_config.head_dim": HEAD_DIM, "text_config.rope_parameters": _THREE_AXES},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": HEAD_DIM},
    "ministral": {"head_dim": HEAD_DIM},
    "nemo_speechlm": {"text_config.layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "nemotron": {"num_key_value_heads": KEY_VALUE_HEADS},
    "t5gemma": {"decoder_start_token_id": 2},  # not padding, which its decoder would hide
    "mobilebert": {"embedding_size": 32},
    # Its chunks and its axes divide the batch's 30 tokens.
    "reformer": {
        "axial_pos_embds_dim": (32, 32), "axial_pos_shape": (5, 6), "local_attn_chunk_length": 10, "lsh_attn_chunk_length": 15,
    },
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "glmga": {"text_config.rope_parameters": _THREE_AXES},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
}  # fmt: skip
