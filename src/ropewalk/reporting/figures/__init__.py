"""Build figures from plain results, as the specifications in ``primitives``; ``drawing`` writes them to files."""
