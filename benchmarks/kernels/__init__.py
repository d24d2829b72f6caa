"""Benchmarks of one layer's kernels: their times, errors, and peers from other libraries."""
