"""Benchmarks of one decode step of SGLang, dense and sparse."""
