"""What the user's own code is, and what it keeps: attributes of objects, names of files and classes, generators, iterators."""
