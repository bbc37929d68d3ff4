"""A Llama-like decoder in plain torch: grouped-query attention, rotary positions, RMSNorm, SwiGLU.

Nothing in it knows of sequence parallelism: it is what a user might have written, and the strategy must carry it as it
is. It takes its positions from the caller, as Hugging Face models do.

Legend: B batch, S tokens, H query heads, K key-value heads, D head dim, E model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sp.errors import SequenceParallelError, check_whole_numbers
from lightning_sp.models.layers import NormalEmbedding, NormalLinear


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a `Llama`.

    Args:
        vocab_size: Number of token ids.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; divides ``num_heads``.
        hidden_dim: Width of the SwiGLU's inner layer.
        rope_theta: Base of the rotary frequencies.
        qk_bias: Initial value of biases on queries and keys (Qwen2 has such biases); None: no biases. Equal ones start the
            attention at near tokens, for after rotation their product is ``2 qk_bias ** 2 sum_i cos(distance theta_i)``:
            over thousands of tokens that saves hundreds of steps of learning where to look.
        embedding_std: Standard deviation of the initial embeddings. A matrix takes ``in_features ** -0.5``, those that
            write to the residual stream ``(2 num_layers) ** -0.5`` of it: activations keep the embeddings' scale.
        head_std: That of the output head; small, so that the untrained model guesses evenly.
    """

    vocab_size: int = 257
    dim: int = 128
    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 4
    hidden_dim: int = 384
    rope_theta: float = 10000.0
    qk_bias: float | None = None
    norm_eps: float = 1e-5
    embedding_std: float = 1.0
    head_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "hidden_dim")
        check_whole_numbers({name: getattr(self, name) for name in sizes})
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise SequenceParallelError(
                f"dim={self.dim} over num_heads={self.num_heads}: rotary positions need an even, whole head dim; "
                f"choose dim as a multiple of {2 * self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise SequenceParallelError(
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: each key-value head serves the same "
                f"number of query heads; choose a divisor of {self.num_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    def build(self) -> Llama:
        """Make the model, its weights drawn from torch's default generator."""
        return Llama(self)


def rotary_angles(position_ids_BS: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position's rotary angles, computed in float32 or wider.

    Shapes: (B, S) -> two of (B, 1, S, D / 2).
    Source: RoFormer, https://arxiv.org/abs/2104.09864, equation 15.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=position_ids_BS.device, dtype=wide) / head_dim
    angles = position_ids_BS.to(wide)[:, None, :, None] * theta**-exponent
    return angles.cos(), angles.sin()


def rotate(x_BHSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of the last dim by their position's angles."""
    first, second = x_BHSD.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHSD.dtype)


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig, *, output_scale: float) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.is_grouped = config.num_kv_heads != config.num_heads
        kv_dim = config.num_kv_heads * self.head_dim
        biased, bias, std = config.qk_bias is not None, config.qk_bias or 0.0, config.dim**-0.5
        self.query = NormalLinear(config.dim, config.dim, bias=biased, std=std, bias_value=bias)
        self.key = NormalLinear(config.dim, kv_dim, bias=biased, std=std, bias_value=bias)
        self.value = NormalLinear(config.dim, kv_dim, std=config.dim**-0.5)
        self.output = NormalLinear(config.dim, config.dim, std=output_scale * config.dim**-0.5)

    def forward(self, x_BSE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend from every token to itself and those before it."""
        heads = (*x_BSE.shape[:2], -1, self.head_dim)
        q_BHSD = rotate(self.query(x_BSE).view(heads).transpose(1, 2), cos, sin)
        k_BKSD = rotate(self.key(x_BSE).view(heads).transpose(1, 2), cos, sin)
        v_BKSD = self.value(x_BSE).view(heads).transpose(1, 2)
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=self.is_grouped)
        mixed_BSE: Tensor = self.output(out_BHSD.transpose(1, 2).flatten(2))
        return mixed_BSE


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig, *, output_scale: float) -> None:
        super().__init__()
        self.gate = NormalLinear(config.dim, config.hidden_dim, std=config.dim**-0.5)
        self.up = NormalLinear(config.dim, config.hidden_dim, std=config.dim**-0.5)
        self.down = NormalLinear(config.hidden_dim, config.dim, std=output_scale * config.hidden_dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the last dim."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        output_scale = (2 * config.num_layers) ** -0.5
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, output_scale=output_scale)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config, output_scale=output_scale)

    def forward(self, x_BSE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the block."""
        x_BSE = x_BSE + self.attention(self.attention_norm(x_BSE), cos, sin)
        x_BSE = x_BSE + self.feed_forward(self.feed_forward_norm(x_BSE))
        return x_BSE


class Llama(nn.Module):
    """The decoder: token ids and their positions in, logits out.

    Attributes:
        tp_plan: which layers tensor parallelism splits, and how.
    """

    tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.attention.query": "colwise",
        "layers.*.attention.key": "colwise",
        "layers.*.attention.value": "colwise",
        "layers.*.attention.output": "rowwise",
        "layers.*.feed_forward.gate": "colwise",
        "layers.*.feed_forward.up": "colwise",
        "layers.*.feed_forward.down": "rowwise",
        "embedding": "embedding_rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = NormalEmbedding(config.vocab_size, config.dim, std=config.embedding_std)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = NormalLinear(config.dim, config.vocab_size, std=config.head_std)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output head, as Hugging Face's models do."""
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the next token's logits at every position.

        Shapes: (B, S), (B, S) -> (B, S, V).
        """
        x_BSE = self.embedding(input_ids)
        cos, sin = rotary_angles(
            position_ids, head_dim=self.config.head_dim, theta=self.config.rope_theta, dtype=self.embedding.weight.dtype
        )
        for layer in self.layers:
            x_BSE = layer(x_BSE, cos, sin)
        logits_BSV: Tensor = self.head(self.norm(x_BSE))
        return logits_BSV
