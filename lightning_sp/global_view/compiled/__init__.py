"""Compiled code in the global view: torch.compile captures a user's functions, the table of rules makes this rank's graph of them."""
