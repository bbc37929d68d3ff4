"""Encoders before a decoder: of a sequence of their own, or whole on every rank."""
