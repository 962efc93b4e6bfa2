"""Experiments: the same recipe with varied keys and seeds, and which differences are more than chance."""
