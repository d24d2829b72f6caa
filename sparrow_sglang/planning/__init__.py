"""The predicted cost of a decode step, from shapes."""
