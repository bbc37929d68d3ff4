"""What a checkpoint holds: the model's and the optimizers' states, random states, and what is left out."""
