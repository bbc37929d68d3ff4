"""What a step in progress knows: the sharded batch, its masks, the attention calls and the losses so far."""
