"""What a decode step costs, from shapes."""
