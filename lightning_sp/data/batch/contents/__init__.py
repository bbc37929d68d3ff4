"""What a batch holds, before any of it is split: its entries, targets, media, and whether there is a sequence."""
