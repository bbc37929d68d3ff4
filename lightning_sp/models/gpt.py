"""A GPT in plain torch: learned positions, LayerNorm, multi-head attention, GELU, optional dropout.

Nothing in it knows of sequence parallelism. Learned positions make it the stricter test of the two models here: a shard
that is given wrong positions changes its logits, where rotary ones hide an equal offset.

Legend: B batch, S tokens, H heads, D head dim, E model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sp.errors import SequenceParallelError, check_whole_numbers
from lightning_sp.models.layers import NormalEmbedding, NormalLinear


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`.

    Args:
        vocab_size: Number of token ids.
        max_positions: Rows of the position table: the longest sequence.
        dropout: Probability on the embeddings and on what each layer adds; never on the attention weights, which would
            need the S x S matrix.
        init_std: Standard deviation of the initial weights; layers that write to the residual stream take
            ``init_std / sqrt(2 num_layers)``.
    """

    vocab_size: int = 257
    max_positions: int = 8192
    dim: int = 128
    num_layers: int = 2
    num_heads: int = 8
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "max_positions", "dim", "num_layers", "num_heads")
        check_whole_numbers({name: getattr(self, name) for name in sizes})
        if self.dim % self.num_heads:
            raise SequenceParallelError(
                f"dim={self.dim} over num_heads={self.num_heads}: heads have one whole width; "
                f"choose dim as a multiple of {self.num_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads: as many as query heads."""
        return self.num_heads

    def build(self) -> GPT:
        """Make the model, its weights drawn from torch's default generator."""
        return GPT(self)


class Attention(nn.Module):
    """Causal multi-head self-attention with one projection for q, k and v."""

    def __init__(self, config: GPTConfig, *, output_std: float) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = NormalLinear(config.dim, 3 * config.dim, bias=True, std=config.init_std)
        self.output = NormalLinear(config.dim, config.dim, bias=True, std=output_std)

    def forward(self, x_BSE: Tensor) -> Tensor:
        """Attend from every token to itself and those before it."""
        qkv = self.qkv(x_BSE).unflatten(-1, (3, self.num_heads, -1))
        q_BHSD, k_BHSD, v_BHSD = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=True)
        mixed_BSE: Tensor = self.output(out_BHSD.transpose(1, 2).flatten(2))
        return mixed_BSE


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        output_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config, output_std=output_std)
        self.feed_forward_norm = nn.LayerNorm(config.dim)
        self.up = NormalLinear(config.dim, 4 * config.dim, bias=True, std=config.init_std)
        self.down = NormalLinear(4 * config.dim, config.dim, bias=True, std=output_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSE: Tensor) -> Tensor:
        """Apply the block."""
        x_BSE = x_BSE + self.dropout(self.attention(self.attention_norm(x_BSE)))
        hidden = F.gelu(self.up(self.feed_forward_norm(x_BSE)))
        x_BSE = x_BSE + self.dropout(self.down(hidden))
        return x_BSE


class GPT(nn.Module):
    """The decoder: token ids and their positions in, logits out.

    Attributes:
        tp_plan: which layers tensor parallelism splits, and how. The one projection for q, k and v is whole.
    """

    tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "embedding": "embedding_rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = NormalEmbedding(config.vocab_size, config.dim, std=config.init_std)
        self.positions = NormalEmbedding(config.max_positions, config.dim, std=config.init_std)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = NormalLinear(config.dim, config.vocab_size, std=config.init_std)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output head, as Hugging Face's models do."""
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the next token's logits at every position.

        Shapes: (B, S), (B, S) -> (B, S, V).
        """
        x_BSE = self.dropout(self.embedding(input_ids) + self.positions(position_ids))
        for layer in self.layers:
            x_BSE = layer(x_BSE)
        logits_BSV: Tensor = self.head(self.norm(x_BSE))
        return logits_BSV
