"""Build figures from plain results. ``drawing`` draws on axes and writes files; ``prepare`` prepares the numbers."""
