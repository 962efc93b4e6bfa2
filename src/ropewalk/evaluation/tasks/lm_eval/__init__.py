"""Suites that lm_eval runs: short-context tasks, LongBench, and any other task of lm_eval."""
