"""How attention and positions get into a model from outside."""
