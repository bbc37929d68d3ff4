"""Loaders that give all ranks of a sequence the same samples: ours, and the user's own made so."""
