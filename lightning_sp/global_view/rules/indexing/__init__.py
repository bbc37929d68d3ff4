"""Rules of tokens that are taken, chosen, written and added up by an index or a mask."""
