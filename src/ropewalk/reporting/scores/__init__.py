"""Scores of evaluations: their tables, and the pages of an evaluation and of a comparison of recipes."""
