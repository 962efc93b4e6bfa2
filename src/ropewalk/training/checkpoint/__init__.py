"""Checkpoints of one process and of several."""
