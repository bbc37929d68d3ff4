"""Attention alone, on 2 to 4 ranks: what it costs, sends and holds, and how equal its ranks are."""
