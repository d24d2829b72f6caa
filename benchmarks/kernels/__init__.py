"""The kernels of one layer: their time, their errors, their peers."""
