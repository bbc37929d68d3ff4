"""The peak memory of a rank, by option: while a model is built, in a step, in its loss."""
