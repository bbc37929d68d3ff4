"""What all ranks have alike at a step: the update and its options, writes, replicas of parameters, buffers."""
