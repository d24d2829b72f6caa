"""The audit of a running server: finished requests are scored again, densely."""
