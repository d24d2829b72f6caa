"""Training runs, on disk and while they last: set-up, checkpoints, logs, termination."""
