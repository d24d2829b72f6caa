"""Untrusted programs, run within limits, in a container or confined by the kernel."""
