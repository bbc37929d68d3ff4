"""What a difference means: the verdict, and the likely cause, found by experiment."""
