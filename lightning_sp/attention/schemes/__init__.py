"""How ranks share one attention: Ulysses, ring, all-gather, and what carries their keys and values."""
