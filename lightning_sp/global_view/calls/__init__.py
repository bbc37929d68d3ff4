"""A call of a function of torch, before a rule has it: its arguments by position, functions that are bodies, tokens taken out."""
