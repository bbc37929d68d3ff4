"""What each function of torch does with a tensor of the sequence, family by family; `table` joins them."""
