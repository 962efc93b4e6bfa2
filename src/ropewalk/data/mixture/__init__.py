"""The mixture: which documents are read, how often, and in which order."""
