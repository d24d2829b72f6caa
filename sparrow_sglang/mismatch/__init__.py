"""Acceptance rates and their tails; pure arithmetic."""
