"""Models to begin with; none of them knows of sequence parallelism."""

from lightning_sp.models.causal_lm import CausalLM
from lightning_sp.models.gpt import GPT, GPTConfig
from lightning_sp.models.hugging_face import HuggingFaceConfig
from lightning_sp.models.layers import init_weights
from lightning_sp.models.llama import Llama, LlamaConfig

__all__ = ["GPT", "CausalLM", "GPTConfig", "HuggingFaceConfig", "Llama", "LlamaConfig", "init_weights"]
