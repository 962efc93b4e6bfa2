"""The checks, one module a claim."""
