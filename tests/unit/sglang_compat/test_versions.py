"""An SGLang that cannot be run with is refused before anything is loaded, in one line."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from sparrow_sglang.errors import InputError
from sparrow_sglang.plugin import hooks, registration
from sparrow_sglang.plugin.arguments import layer_refusals
from sparrow_sglang.plugin.lossless.hooks import HOOKS
from sparrow_sglang.plugin.state import PROCESS
from sparrow_sglang.sglang_compat import versions
from sparrow_sglang.sglang_compat.versions import INSTALL, LOCKED, SUPPORTED, version_problems

ROOT = Path(__file__).parents[3]
Pretend = Callable[..., None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Say that this version of SGLang is installed."""
    return lambda version: monkeypatch.setattr(versions, "package_version", lambda _: version)


@pytest.fixture
def older(pretend: Pretend) -> str:
    pretend("0.5.9")
    return re.escape(f"SGLang 0.5.9: expected {SUPPORTED[0]} or newer; {INSTALL}") + "$"


class TestInstallation:
    def test_the_range_and_the_locked_version_are_those_of_the_package(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        [allowed] = [r for r in map(Requirement, project["dependencies"]) if r.name == "sglang"]
        assert all(version in allowed.specifier for version in SUPPORTED)
        assert "0.5.14" not in allowed.specifier
        assert f"sglang=={LOCKED}" in (ROOT / "constraints.txt").read_text().splitlines()
        assert LOCKED in SUPPORTED

    def test_newer_ones_are_left_to_the_probes(self, pretend: Pretend) -> None:
        for version in (*SUPPORTED, "0.5.18", "9.9.9"):
            pretend(version)
            assert version_problems() == []


class TestRefusal:
    def test_arguments_of_an_engine(self, older: str, make_args: Any) -> None:
        with pytest.raises(InputError, match=older):
            make_args()
        # Users of another backend may keep an older SGLang.
        make_args(attention_backend="torch_native", sparrow_schedule=None)

    def test_a_scheduler_does_not_start(self, older: str) -> None:
        with pytest.raises(InputError, match=older):
            registration.build_backend(SimpleNamespace())


class TestProbes:
    """What hooks need is looked for at start-up, whatever the version is called."""

    @pytest.fixture
    def registered(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        from sglang.srt.plugins.hook_registry import HookRegistry

        monkeypatch.setattr(PROCESS, "error", None)
        monkeypatch.setattr(PROCESS, "hooks", PROCESS.hooks)
        targets: list[str] = []
        monkeypatch.setattr(HookRegistry, "register", lambda target, *_: targets.append(target))
        return targets

    def test_every_probe_passes_here(self) -> None:
        everything = [*hooks.HOOKS, *HOOKS, *hooks.CPU_HOOKS]
        assert registration.probe_problems(everything) == []

    def test_an_untried_version_is_registered_if_all_pass(
        self, pretend: Pretend, registered: list[str]
    ) -> None:
        pretend("9.9.9")
        registration.register()
        assert len(registered) >= len(hooks.HOOKS)

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            (
                {"target": "sglang.srt.mem_cache.common.gone"},
                "sglang.srt.mem_cache.common.gone is not there",
            ),
            (
                {"parameters": "req tree_cache keep"},
                "sglang.srt.mem_cache.common.release_kv_cache takes (req, tree_cache, ",
            ),
        ],
    )
    def test_one_that_fails_is_named_and_nothing_is_hooked(
        self,
        pretend: Pretend,
        registered: list[str],
        monkeypatch: pytest.MonkeyPatch,
        make_args: Any,
        change: dict[str, str],
        problem: str,
    ) -> None:
        pretend("9.9.9")
        [hook] = [h for h in hooks.HOOKS if h.target.endswith(".release_kv_cache")]
        monkeypatch.setattr(registration, "HOOKS", (hook._replace(**change),))
        line = f"  - SGLang 9.9.9: {problem}"
        with pytest.raises(InputError, match=re.escape(line)):
            registration.register()
        assert registered == []
        # The launching process refuses before it loads anything, and does not fall back to dense.
        with pytest.raises(RuntimeError, match=re.escape(line)):
            make_args()

    def test_an_attribute_of_attention_that_nobody_has_looked_at(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known = layer_refusals.LAYER_KNOWN - {"scaling"}
        monkeypatch.setattr(layer_refusals, "LAYER_KNOWN", known)
        [problem] = registration.probe_problems([])
        assert ": RadixAttention has scaling, which may ask for more; " in problem
