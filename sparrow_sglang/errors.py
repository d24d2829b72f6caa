"""Errors of this package. A message is one line: the name, the value, and what is allowed. Errors
that some caller handles differently have a class of their own, defined where it is raised."""


class SparrowError(Exception):
    """Base of every error of this package."""


class InputError(SparrowError, ValueError):
    """A flag, a setting, a file or an argument cannot be used as it is."""
