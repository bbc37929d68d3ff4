"""Where Lightning's own machinery is adapted: processes, and the features of its Trainer."""
