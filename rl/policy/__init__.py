"""The trained model: dense log-probs and updates, and the sparse distribution in the trainer."""
