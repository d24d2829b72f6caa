"""What the sandbox says before it runs a program, and its control group."""

import shutil
from pathlib import Path

import pytest

from sparrow_sglang.rl.sandbox import cgroup as sandbox_cgroup
from sparrow_sglang.rl.sandbox.run import (
    WEAKNESSES,
    SandboxError,
    check_sandbox,
    run_python,
    weaknesses,
)


def test_a_control_group_is_made_where_controllers_are_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_cgroup, "REMOVE_S", 0.0)
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    group_folder = tmp_path / next((line[4:] for line in lines if line.startswith("0::")), "")
    group_folder.mkdir(parents=True, exist_ok=True)
    assert sandbox_cgroup.usable_parent(tmp_path) is None
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.procs").write_text("")
    parent = sandbox_cgroup.usable_parent(tmp_path)
    assert parent == tmp_path or not any(line.startswith("0::") for line in lines)
    with sandbox_cgroup.ControlGroup.for_program(1 << 28, 16, tmp_path) as group:
        assert group.folder is not None and group.folder.parent == tmp_path
        group.enter()
        files = {path.name: path.read_text() for path in group.folder.iterdir()}
        assert files["memory.max"] == str(1 << 28) and files["cgroup.procs"] == "0"
        assert 16 <= int(files["pids.max"]) <= 20
        events = group.folder / "memory.events"
        events.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 0\noom_group_kill 0\n")
        assert not group.out_of_memory()
        events.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 1\n")
        assert group.out_of_memory()


def test_without_bubblewrap_programs_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    which = shutil.which

    def without_bubblewrap(program: str, path: str | None = None) -> str | None:
        return None if program == "bwrap" else which(program, path=path)

    monkeypatch.setattr("sparrow_sglang.rl.sandbox.run.shutil.which", without_bubblewrap)
    with pytest.raises(SandboxError, match="bwrap is not installed") as caught:
        check_sandbox("bubblewrap")
    message = str(caught.value)
    assert "\n" not in message and "apt-get install -y bubblewrap" in message
    assert 'sandbox = "weak"' in message
    assert all(weakness in message for weakness in weaknesses())
    with pytest.raises(SandboxError, match="bwrap is not installed"):
        run_python("print(1)")


def test_what_weak_means_is_documented() -> None:
    words = " ".join((Path(__file__).parents[3] / "docs" / "training.md").read_text().split())
    for weakness in WEAKNESSES.values():
        assert weakness in words
    assert set(weaknesses()) <= set(WEAKNESSES.values())
