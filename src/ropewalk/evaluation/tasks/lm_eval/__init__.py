"""Suites that lm_eval runs: short context, LongBench, and any other task of its own."""
