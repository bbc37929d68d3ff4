"""The first batch of an evaluation, whole and sharded: what it logs, returns and keeps."""
