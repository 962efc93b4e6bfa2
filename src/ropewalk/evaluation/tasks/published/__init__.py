"""Published benchmarks whose questions the user downloads, with one module for each."""
