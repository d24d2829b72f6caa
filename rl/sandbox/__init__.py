"""Programs that nobody trusts, run in a container or confined, within limits."""
