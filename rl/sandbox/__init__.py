"""Untrusted programs, run within limits: in a container on this machine, or by a server."""
