"""Benchmarks of training: memory, learning curves, weight transfer, DistillSparse."""
