"""Files of a run, such as locks and logs, with one implementation of each for all packages."""
