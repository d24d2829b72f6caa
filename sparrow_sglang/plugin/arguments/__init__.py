"""Flags of a server, what is rejected of them, and the mode that they choose."""
