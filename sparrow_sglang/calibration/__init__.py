"""Calibration: measures a model on prompts and writes a schedule file with its evidence."""
