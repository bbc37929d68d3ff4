"""Gathers of FSDP2's, and its other collectives: met by all ranks in a trial, watched behind a run, and in which dtype weights travel."""
