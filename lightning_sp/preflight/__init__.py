"""Before the first step: the user's own training_step on a crop, once whole and once sharded, loss and every gradient compared."""
