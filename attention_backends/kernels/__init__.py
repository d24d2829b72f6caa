"""Triton kernels of the sparse decode step; one operation a file, each defined by `reference`."""
