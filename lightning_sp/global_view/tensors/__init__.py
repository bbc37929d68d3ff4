"""The tensor that shows a whole sequence and holds a rank's part: where its tokens are, its views, and what a compiler sees of it."""
