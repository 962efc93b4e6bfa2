"""Checkpoints of single-process and distributed runs."""
