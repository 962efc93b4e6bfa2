"""Files of a run: locks and logs, one implementation of each for every room."""
