"""The predicted time of a decode step, from shapes and measured steps."""
