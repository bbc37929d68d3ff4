"""What is written down while a step runs: its calls, dtypes, random draws and attention."""
