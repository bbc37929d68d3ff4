"""Losses that a Hugging Face model computes itself, made those of the whole sequence."""
