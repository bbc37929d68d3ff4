"""What a crop cannot show of longer sequences: larger crops, and branches on lengths that no trial has reached."""
