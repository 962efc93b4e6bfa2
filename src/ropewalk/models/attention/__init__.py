"""Attention of transformers models: packed rows in it, and its computation outside of it."""
