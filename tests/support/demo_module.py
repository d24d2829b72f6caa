"""`examples/demo.py` as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sparrow_demo", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses looks the module up in sys.modules while the classes are created.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


demo = load_demo()
