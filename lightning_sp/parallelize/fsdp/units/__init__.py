"""The units of FSDP2: which parts of a model are gathered and freed together, and when."""
