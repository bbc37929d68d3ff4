"""What is computed where: from a mask and a layout to the blocks of each rank."""
