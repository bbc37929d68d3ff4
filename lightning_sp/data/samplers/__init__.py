"""Which sample comes when, on which data-parallel rank: in training and in evaluation."""
