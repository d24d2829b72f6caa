"""Benchmarks of servers and whole rollouts under load."""
