"""MLPs, experts and norms of transformer blocks in tiles of tokens: which they are, whether each takes a token by itself, and their calls."""

from lightning_sp.parallelize.tiles.of_blocks import MlpTiles, tile_mlps, without_tiles
from lightning_sp.parallelize.tiles.structure import Tileable
from lightning_sp.parallelize.tiles.tiled_mlp import TiledMLP

__all__ = ["MlpTiles", "Tileable", "TiledMLP", "tile_mlps", "without_tiles"]
