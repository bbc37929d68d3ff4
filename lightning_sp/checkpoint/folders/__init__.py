"""The folder of a checkpoint, on a disk or in an object store: its files, its name, what is found of it and what becomes of old ones."""
