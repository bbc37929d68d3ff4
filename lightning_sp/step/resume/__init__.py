"""What a checkpoint stores of a run for its resume: how far its data has come, its random streams."""
