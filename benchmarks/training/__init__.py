"""Training: memory, learning curves, weight transfer, DistillSparse."""
