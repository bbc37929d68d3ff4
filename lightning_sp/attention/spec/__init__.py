"""What is attended: the mask, what changes the scores, dropout, positions. Values only; nothing here communicates."""
