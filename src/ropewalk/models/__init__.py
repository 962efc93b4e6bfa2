"""The only package that imports internals of transformers."""
