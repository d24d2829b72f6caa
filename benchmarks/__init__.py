"""Benchmarks behind the README's numbers; each writes JSON with device, versions and commit."""
