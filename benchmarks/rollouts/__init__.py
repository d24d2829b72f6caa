"""Servers and whole rollouts under load."""
