"""The index of a filler: ``~i`` for sample i, of a type of its own, for users' data sets have negative indices too."""


class FillerIndex(int):
    """``~i`` where sample i is repeated as a filler."""
