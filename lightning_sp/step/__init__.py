"""A step in progress: run, isolated, its predictions, and the random streams and positions that a resume needs."""
