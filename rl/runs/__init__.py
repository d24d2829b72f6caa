"""A run on disk and while it lasts: set-up, checkpoints, logs, termination."""
