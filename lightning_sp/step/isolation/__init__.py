"""A step that leaves no trace: what it may change of modules, of the run, and of what the user's code keeps elsewhere is put back."""
