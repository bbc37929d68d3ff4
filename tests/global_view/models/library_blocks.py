"""Models of other libraries as they are written, tiny: x-transformers, LitGPT, torchtune. Each is made where its library is installed.

`python -m tools.library_blocks` installs them in folders of their own, and runs what is here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from tests.global_view.whole import E, V

# Of a library, the module that is looked for.
LIBRARIES = {"x-transformers": "x_transformers", "litgpt": "litgpt", "torchtune": "torchtune"}
Call = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]


class Called(nn.Module):
    """A module of a library, called with what it takes of a batch."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor, ids: Tensor, mask: Tensor) -> Any:
        return self.call(self.module, x, ids, mask)


def is_there(library: str) -> bool:
    return find_spec(LIBRARIES[library]) is not None


def of_states(module: nn.Module, x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return module(x)


def of_padded_states(module: nn.Module, x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return module(x, mask=mask.bool())


def of_ids(module: nn.Module, x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return module(ids)


def of_padded_ids(module: nn.Module, x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return module(ids, mask=mask.bool())


def of_eight_ids(module: nn.Module, x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return module(ids[:, :8])


# Of a `Decoder`, by what is switched on.
OF_X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "rotary": {"rotary_pos_emb": True},
    "xpos": {"rotary_pos_emb": True, "rotary_xpos": True},
    "polar": {"polar_pos_emb": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "T5 bias": {"rel_pos_bias": True},
    "dynamic bias": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": False},
    "forgetting": {"attn_data_dependent_alibi": True},
    "CoPE": {"attn_use_cope": True, "attn_cope_max_pos": 8, "attn_cope_talking_heads": False},
    "window": {"attn_max_attend_past": 3},
    "talking heads": {"attn_pre_talking_heads": True},
    "talking heads behind": {"attn_post_talking_heads": True},
    "sparse topk": {"attn_sparse_topk": 3},
    "selective": {"attn_selective": True},
    "softclamp": {"attn_softclamp_logits": True},
    "l2 distance": {"attn_l2_distance": True},
    "laser": {"attn_laser": True},
    "sinks": {"attn_head_learned_sink": True},
    "zero key": {"attn_add_zero_kv": True},
    "memory keys": {"attn_num_mem_kv": 2},
    "one key head": {"attn_one_kv_head": True},
    "normed queries": {"attn_qk_norm": True},
    "gated values": {"attn_gate_values": True},
    "head scale": {"attn_head_scale": True},
    "value residual": {"add_value_residual": True, "learned_value_residual_mix": True},
    "residual attention": {"residual_attn": True},
    "hyper connections": {"num_residual_streams": 2},
    "GRU gates": {"gate_residual": True},
    "post norm": {"pre_norm": False},
    "shifted tokens": {"shift_tokens": 1},
    "macaron": {"macaron": True},
    "sandwich": {"sandwich_coef": 1},
    "GLU": {"ff_glu": True, "ff_swish": True},
    "RMS norm": {"use_rmsnorm": True},
    "simple RMS norm": {"use_simple_rmsnorm": True},
    "scale norm": {"use_scalenorm": True},
    "dynamic tanh": {"use_dynamic_tanh": True},
}


def decoder(**options: Any) -> nn.Module:
    from x_transformers import Decoder

    return Called(Decoder(dim=E, depth=2, heads=2, attn_dim_head=8, **options), of_states)


def encoder() -> nn.Module:
    from x_transformers import Encoder

    return Called(Encoder(dim=E, depth=2, heads=2, attn_dim_head=8), of_padded_states)


def language_model(call: Call, **options: Any) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=E, depth=2, heads=2, attn_dim_head=8)
    return Called(TransformerWrapper(num_tokens=V, max_seq_len=64, attn_layers=layers, **options), call)


def autoregressive() -> nn.Module:
    from x_transformers import AutoregressiveWrapper

    return Called(AutoregressiveWrapper(language_model(of_ids).module), of_ids)


# Of LitGPT's configurations, what is tiny.
OF_LITGPT: dict[str, dict[str, Any]] = {
    "pythia-14m": {},
    "phi-2": {},
    "OLMo-1B-hf": {},
    "falcon-7b": {"n_query_groups": 1},
    "Llama-2-7b-hf": {"n_query_groups": 1},
    "Llama-3.2-1B": {"n_query_groups": 1},
    "Qwen3-0.6B": {"n_query_groups": 1, "head_size": 4},
    "Gemma-2-2b": {"n_query_groups": 1, "sliding_window_size": 4, "head_size": 4},
    "Gemma-3-1b-it": {"n_query_groups": 1, "sliding_window_size": 4, "head_size": 4},
    "Mixtral-8x7B-v0.1": {"n_query_groups": 1, "n_expert": 3, "n_expert_per_token": 2},
}


def of_litgpt(name: str, options: dict[str, Any]) -> nn.Module:
    from litgpt.model import GPT, Config

    tiny = dict(n_layer=2, n_head=2, n_embd=E, padded_vocab_size=V, block_size=64, intermediate_size=16)
    return Called(GPT(Config.from_name(name, **{**tiny, **options})), of_ids)


_TUNED = dict(vocab_size=V, num_layers=2, num_heads=2, embed_dim=E, max_seq_len=64, intermediate_dim=16)
# Of torchtune's builders, the module that has each, and its own arguments.
OF_TORCHTUNE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama2", {"num_kv_heads": 2}),
    "llama3_1": ("llama3_1._component_builders", {"num_kv_heads": 1}),
    "mistral": ("mistral", {"num_kv_heads": 1}),
    "qwen2": ("qwen2", {"num_kv_heads": 1}),
    "phi3": ("phi3", {"num_kv_heads": 2}),
    "gemma": ("gemma", {"num_kv_heads": 1, "head_dim": 4}),
    "gemma2": ("gemma2", {"num_kv_heads": 1, "head_dim": 4, "sliding_window_size": 4}),
}


def of_torchtune(name: str) -> nn.Module:
    from importlib import import_module

    place, options = OF_TORCHTUNE[name]
    return Called(getattr(import_module(f"torchtune.models.{place}"), name)(**_TUNED, **options), of_ids)


def with_lora() -> nn.Module:
    from torchtune.models.llama3_1._component_builders import lora_llama3_1

    return Called(lora_llama3_1(["q_proj", "v_proj"], num_kv_heads=1, lora_rank=2, lora_alpha=4, **_TUNED), of_ids)


def t5_encoder() -> nn.Module:
    from torchtune.models.t5._component_builders import t5_encoder as made

    return Called(
        made(
            embed_dim=E, mlp_dim=16, num_heads=2, head_dim=4, num_layers=2, rel_pos_num_buckets=8, rel_pos_max_dist=16,
            vocab_size=V, norm_eps=1e-6, max_seq_len=8,
        ),
        of_eight_ids,
    )  # fmt: skip


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    **{f"x-transformers: {name}": lambda given=given: decoder(**given) for name, given in OF_X_TRANSFORMERS.items()},
    "x-transformers: encoder": encoder,
    "x-transformers: language model": lambda: language_model(of_padded_ids),
    "x-transformers: sines": lambda: language_model(of_ids, scaled_sinu_pos_emb=True),
    "x-transformers: memory tokens": lambda: language_model(of_ids, num_memory_tokens=3),
    "x-transformers: loss": autoregressive,
    **{f"litgpt: {name}": lambda name=name, given=given: of_litgpt(name, given) for name, given in OF_LITGPT.items()},
    **{f"torchtune: {name}": lambda name=name: of_torchtune(name) for name in OF_TORCHTUNE},
    "torchtune: LoRA": with_lora,
    "torchtune: T5's encoder": t5_encoder,
}
