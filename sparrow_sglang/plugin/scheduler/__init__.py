"""Schedulers and the model's passes: hooks, graphs, memory, timing, exact acceptance rates."""
