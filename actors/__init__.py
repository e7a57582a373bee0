"""First floor: the rooms of a run and the small runtime they share."""
