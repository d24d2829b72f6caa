"""Trainer workers and engines as Ray actors, on one host or many: the section `[cluster]`."""
