"""Rules of what goes along the sequence: sums, norms, scans, convolutions, transforms, tokens in other positions."""
