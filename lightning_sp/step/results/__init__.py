"""What a step returns and keeps, as of one device: whole sequences, all samples."""
