"""Numbers that a user logs: summed, averaged and compared so that they are those of one device."""
