"""Rollout engines, in this process or on Ray, and how weights reach them."""
