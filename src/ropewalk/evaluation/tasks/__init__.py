"""The benchmarks, with one module or package for each."""
