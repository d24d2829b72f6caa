"""What a decode step and a rollout will cost, from shapes."""
