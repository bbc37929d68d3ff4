"""A step of training: its time, its host's work and its waits."""
