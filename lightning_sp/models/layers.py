"""Linear and embedding layers that know how they are initialised.

`reset_parameters` is torch's convention for drawing a layer's weights again. The layers here keep their standard
deviation, so drawing them at construction and drawing them after a materialisation from the meta device give the same
weights for the same seed: both walk the modules in the order in which they were made.
"""

from __future__ import annotations

from torch import nn


class NormalLinear(nn.Linear):
    """A `nn.Linear` whose weight is drawn from N(0, std) and whose bias, if it has one, starts at a given value."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, std: float = 0.02, bias_value: float = 0.0
    ) -> None:
        self.std, self.bias_value = std, bias_value
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight again from torch's default generator."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.constant_(self.bias, self.bias_value)


class NormalEmbedding(nn.Embedding):
    """A `nn.Embedding` whose weight is drawn from N(0, std)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float = 0.02) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the weight again from torch's default generator."""
        nn.init.normal_(self.weight, std=self.std)


def init_weights(model: nn.Module) -> None:
    """Draw every weight of ``model`` again, module by module, in the order in which they were made."""
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
