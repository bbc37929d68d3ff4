"""Ranks that meet before each collective of a trial, so that one that fails holds no other up."""
