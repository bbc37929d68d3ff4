"""A small piece of the batch for the preflight: of one rank's group, of all groups, and as its loader gave it."""
