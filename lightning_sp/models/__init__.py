"""Small plain-torch models for the examples, the tests and the first run."""
