"""Numbers that a user's code keeps and counts: a trial shows them as later in the run, and a phase that begins is noticed."""
