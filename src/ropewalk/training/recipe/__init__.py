"""The recipe: everything that decides a run, as a person writes it."""
