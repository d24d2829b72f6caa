"""What the sandbox says before it runs a program, and its control group."""

import shutil
from pathlib import Path

import pytest

from sparrow_sglang.rl.sandbox import cgroup as sandbox_cgroup
from sparrow_sglang.rl.sandbox.run import SandboxError, check_sandbox, run_python


def own_groups() -> dict[str, str]:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return {names: path.strip("/") for _, names, path in (line.split(":", 2) for line in lines)}


def test_a_control_group_is_made_where_controllers_are_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_cgroup, "REMOVE_S", 0.0)
    (tmp_path / own_groups().get("", "")).mkdir(parents=True, exist_ok=True)
    assert sandbox_cgroup.usable_parents(tmp_path) == ()
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.procs").write_text("")
    assert sandbox_cgroup.usable_parents(tmp_path) == (tmp_path,)
    monkeypatch.setattr(Path, "mkdir", with_files(("memory.max", "pids.max")))
    with sandbox_cgroup.ControlGroup.for_program(1 << 28, 16, tmp_path) as group:
        (folder,) = group.folders
        group.enter()
        files = {path.name: path.read_text() for path in folder.iterdir()}
        assert files["memory.max"] == str(1 << 28) and files["cgroup.procs"] == "0"
        assert 16 <= int(files["pids.max"]) <= 20
        assert not group.out_of_memory()
        events = folder / "memory.events"
        events.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 0\noom_group_kill 0\n")
        assert not group.out_of_memory()
        events.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 1\n")
        assert group.out_of_memory()


MKDIR = Path.mkdir


def with_files(names: tuple[str, ...]) -> object:
    """`Path.mkdir` as in a file system of control groups, where new folders hold files."""

    def mkdir(folder: Path, *how: object, **more: object) -> None:
        MKDIR(folder)
        for name in names:
            (folder / name).write_text("max")

    return mkdir


def test_without_bubblewrap_programs_are_refused_with_both_remedies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else which(name))
    with pytest.raises(SandboxError, match="bwrap is not installed") as caught:
        check_sandbox("bubblewrap")
    message = str(caught.value)
    assert "\n" not in message and "apt-get install -y bubblewrap" in message
    assert 'task.options.sandbox = "http://HOST:8080"' in message
    with pytest.raises(SandboxError, match="bwrap is not installed"):
        run_python("print(1)")
    with pytest.raises(SandboxError, match="refused.*expected the address of a SandboxFusion"):
        check_sandbox("http://127.0.0.1:1")
