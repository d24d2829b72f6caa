"""Prompts in, a schedule file with its evidence out."""
