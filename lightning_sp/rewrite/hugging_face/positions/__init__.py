"""The positions that a Hugging Face model computes from the tokens it is given: those of the whole sequence."""
