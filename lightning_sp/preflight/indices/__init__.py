"""What a step uses as an index on a crop: of padding, of a token in the whole sequence."""
