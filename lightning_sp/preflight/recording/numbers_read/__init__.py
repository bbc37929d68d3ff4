"""Numbers that a step reads from its batch: noted where it may decide by them, and forced, so that it decides otherwise."""
