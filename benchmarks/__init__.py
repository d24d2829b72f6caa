"""Benchmarks behind docs/benchmarks.md; each writes JSON with device, versions and commit."""
