"""Small models that are drawn: operations along the sequence and a loss, by a seed."""
