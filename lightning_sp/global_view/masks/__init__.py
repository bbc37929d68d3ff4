"""Whole masks that are known again, in eager code and while a compiler traces."""
