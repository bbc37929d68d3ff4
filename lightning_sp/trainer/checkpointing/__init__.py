"""Checkpoints as Lightning's Trainer writes and reads them: in the background, stopped half-way, by `load_from_checkpoint`."""
