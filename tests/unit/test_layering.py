"""Imports go one way, by full names; SGLang is changed in few places, and imported late."""

import ast
import subprocess
import sys
from collections.abc import Container, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from sparrow_sglang.commands.cli import BENCHMARKS

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "sparrow_sglang": ROOT / "sparrow_sglang",
    "sparrow_sglang.attention_backends": ROOT / "attention_backends",
    "sparrow_sglang.benchmarks": ROOT / "benchmarks",
    "sparrow_sglang.rl": ROOT / "rl",
}
# Each may import from its own layer and from those above it in this list.
LAYERS = (
    "atomic_write command_line errors hf_config json_values models processes progress provenance"
    " run_folder schedules sglang_compat validation",
    "mismatch planning",
    "attention_backends",
    "plugin",
    "client",
    "calibration",
    "report",
    "rl",
    "benchmarks",
    "commands",
)
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
PLUGIN = "sparrow_sglang.plugin"
# From the top to the bottom: each imports only from rows below its own.
PLUGIN_ORDER = (
    "registration",
    "hooks",
    "launcher",
    "arguments",
    "lossless",
    "mode",
    "scheduler",
    "cpu scheduler_calls state",
    "server_log",
    "names",
)
HOOK_FILES = {f"plugin.{name}" for name in ("registration", "hooks")}


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its full name."""
    return {
        ".".join([package, *path.relative_to(folder).with_suffix("").parts]): path
        for package, folder in PACKAGES.items()
        for path in sorted(folder.rglob("*.py"))
    }


@cache
def imports(path: Path, at_runtime: bool) -> list[str]:
    """Full names that a file imports; `at_runtime` leaves those for type checkers out."""
    names: list[str] = []
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if typing_only and at_runtime:
            skipped |= {child for statement in node.body for child in ast.walk(statement)}
        elif node in skipped:
            continue
        elif isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return names


def layer(module: str) -> int | None:
    parts = module.split(".")
    if parts[0] != "sparrow_sglang" or len(parts) < 2:
        return None
    return LAYER_OF.get(parts[1])


def test_imports_name_modules_in_full() -> None:
    """`imports` refuses relative ones."""
    files = [*modules().values(), *ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.py")]
    assert len(files) > 20
    for path in files:
        for name in imports(path, at_runtime=False):
            assert name.split(".")[0] not in {"attention_backends", "rl", "benchmarks"}, path


def imported() -> Iterator[tuple[str, str]]:
    """Modules of ours, and what each of them imports."""
    for module, path in modules().items():
        for name in imports(path, at_runtime=True):
            yield module, name


def test_imports_go_one_way() -> None:
    for module, name in imported():
        own, other = layer(module), layer(name)
        assert own is None or other is None or other <= own, f"{module} imports {name}"


def test_every_module_has_a_layer() -> None:
    """A new or renamed module would otherwise drop out of the checks without a sound."""
    found = {module.split(".")[1] for module in modules() if "." in module}
    assert set(LAYER_OF) == found - {"__init__"}


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count, too."""
    known = modules()
    graph = {module: _modules_named(imports(path, True), known) for module, path in known.items()}
    TopologicalSorter(graph).prepare()


def _modules_named(names: list[str], known: Container[str]) -> set[str]:
    """Of names such as `package.module.function` or `package.module`, the modules."""
    candidates = (name if name in known else name.rpartition(".")[0] for name in names)
    return {module for module in candidates if module in known}


def test_plugin_folders_import_only_what_stands_below() -> None:
    order = [name for row in PLUGIN_ORDER for name in row.split()]
    rank = {name: level for level, row in enumerate(PLUGIN_ORDER) for name in row.split()}
    found = {module.split(".")[2] for module in modules() if module.startswith(f"{PLUGIN}.")}
    assert found - {"__init__"} == set(order)
    for module, name in imported():
        own, other = (each.removeprefix(f"{PLUGIN}.").split(".")[0] for each in (module, name))
        if own in rank and other in rank and own != other:
            assert rank[own] < rank[other], f"{module} imports {name}"


def test_hooks_and_registries_of_sglang_are_touched_in_few_files() -> None:
    forbidden = ("sglang.srt.plugins.hook_registry", "register_attention_backend")
    for module, name in imported():
        allowed = module.removeprefix("sparrow_sglang.") in HOOK_FILES
        assert allowed or not any(word in name for word in forbidden), f"{module} imports {name}"


def test_kernels_import_themselves_and_the_landmarks_alone() -> None:
    for path in (ROOT / "attention_backends" / "kernels").glob("*.py"):
        for name in imports(path, at_runtime=True):
            ours = name.startswith("sparrow_sglang.")
            own = tuple(
                f".attention_backends.{m}" for m in ("kernels.", "kernel_limits", "landmarks")
            )
            assert not ours or any(part in name for part in own), f"{path.name}: {name}"


def test_light_modules_import_neither_torch_nor_sglang() -> None:
    benchmarks = [f"benchmarks.{name}" for name in BENCHMARKS]
    names = ("schedules.schedule", "models", "commands.cli", *benchmarks)
    code = """
import importlib, sys
from sparrow_sglang import BudgetSchedule
for module in sys.argv[1:]:
    importlib.import_module(module)
    if heavy := {"torch", "sglang", "transformers", "triton"} & set(sys.modules):
        sys.exit(f"{module} imports {heavy}")
"""
    command = [sys.executable, "-c", code, "sparrow_sglang"]
    command += [f"sparrow_sglang.{name}" for name in names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
