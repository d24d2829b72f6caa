"""What `make demo` runs: both answers and training steps, and that it leaves nothing behind."""

import importlib.util
import multiprocessing
import sys
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from engines import import_for_fork
from waiting import wait_until

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


def run_demo() -> None:
    # The server that other tests' reward workers are forked from is no child of this process.
    forkserver._forkserver.__init__()
    sys.exit(demo.main(["--tokens", "8"]))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_shows_both_answers_and_a_step_and_leaves_nothing_behind(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import_for_fork()
    # A third of the text that users see summarised, for which two cores take a minute.
    shorter = demo.long_prompt()[-6000:]
    monkeypatch.setattr(demo, "long_prompt", lambda: shorter)
    training = tmp_path / "training.toml"
    training.write_text(demo.TRAINING.read_text("utf-8").replace("\nsteps = 3", "\nsteps = 1"))
    monkeypatch.setattr(demo, "TRAINING", training)
    process = multiprocessing.get_context("fork").Process(target=run_demo)
    process.start()
    try:
        started = psutil.Process(process.pid)
        wait_until(lambda: len(started.children(recursive=True)) >= 2, 240)
        engine = started.children(recursive=True)
        process.join(560)
    finally:
        process.kill()
        process.join()
    out, err = capfd.readouterr()
    assert process.exitcode == 0, err
    assert (
        "sparse answer:" in out and "dense answer:" in out and "generated         8 tokens" in out
    )
    cached, read = (
        int(line.split()[3]) for line in out.splitlines() if line.startswith("KV tokens")
    )
    assert 1000 < cached and read < cached
    assert "\nstep 0 " in out and "\nstep 1 " not in out
    assert "where to go next" in out
    assert psutil.wait_procs(engine, timeout=30)[1] == []
