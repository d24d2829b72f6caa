"""SGLang's modules without those that the package itself imports, which takes an actor seconds."""

import sys
from importlib.machinery import PathFinder

_here = __file__.removesuffix("/sglang/__init__.py")
_found = PathFinder.find_spec("sglang", [folder for folder in sys.path if folder != _here])
assert _found is not None and _found.submodule_search_locations is not None
__path__ = list(_found.submodule_search_locations)
