"""Pages of a training run, and the card beside its model."""
