"""Processes of a run: how they start, what they are told, how they end."""
