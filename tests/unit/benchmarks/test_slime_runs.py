"""The benchmark of slime's loop: what it makes of slime's samples, and what it refuses."""

import importlib.util
import json
import math
import subprocess
from asyncio import run
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparrow_sglang.benchmarks.processes import ProcessFailed
from sparrow_sglang.benchmarks.result_files import Results
from sparrow_sglang.benchmarks.training import slime_runs
from sparrow_sglang.benchmarks.training.slime_runs import row_of

FOLDER = Path(__file__).parents[3] / "examples" / "slime"


def sample(length: int, reward: float, start: float, rates: list[float]) -> dict[str, Any]:
    events = [{"name": "sglang_generate", "ts": start}, {"name": "reward_model", "ts": 99.0}]
    events.append({"name": "sglang_generate", "ts": start + 2.0})
    return {
        "tokens": list(range(510 + length)),
        "response_length": length,
        "reward": reward,
        "weight_versions": ["1"],
        "metadata": {"sparrow_acceptance": rates} if rates else {},
        "trace": {"events": events},
    }


def test_row_of_a_rollout() -> None:
    # A token that comes out of a prefill has no rate: here the third after the first, at 513.
    rates = [0.5, 0.6, math.nan, 0.9]
    row = row_of(3, [sample(5, 0.5, 10.0, rates), sample(6, 1.0, 11.0, [])])
    assert (row["responses"], row["tokens"], row["lengths"]) == (2, 11, [5, 6])
    assert (row["reward_mean"], row["rewards"]) == (0.75, [0.5, 1.0])
    # The time is that from the first request to the last answer, without rewards.
    assert (row["seconds"], row["tokens_per_s"]) == (3.0, pytest.approx(11 / 3))
    # The first token of a response, at 510, has no rate.
    assert (row["accept_p05_bin0"], row["accept_p05_bin1"]) == (0.5, 0.6)
    assert (row["recorded"], row["accept_tokens"], row["accept_p05"]) == (1, 3, 0.5)


def test_an_evaluation_has_no_tail() -> None:
    assert "accept_p05" not in row_of("eval_0", [sample(4, 0.0, 1.0, [])])


def test_the_recipes_figures_are_those_of_the_run() -> None:
    results = FOLDER.parents[1] / "benchmarks" / "results" / "h200"
    *rollouts, evaluation = json.loads((results / "slime_runs_smollm2-135m.json").read_text())[
        "rows"
    ]
    speeds = [row["tokens_per_s"] for row in rollouts]
    tails = [row["accept_p05"] for row in rollouts]
    bins = [v for row in rollouts for key, v in row.items() if key.startswith("accept_p05_bin")]
    curves = json.loads((results / "learning_curves_story.json").read_text())["rows"]
    dense = [row["curves"]["rollout_corr/kl"] for row in curves if row["schedule"] == "dense"]
    kl = fmean(value for curve in dense for _, value in curve)
    page = " ".join((FOLDER / "README.md").read_text().split())
    for words in (
        f"at {min(speeds):,.0f} to {max(speeds):,.0f} tokens/s",
        f"was {min(tails):.3f} to {max(tails):.3f}, by bins of {slime_runs.BIN_TOKENS} positions"
        f" {min(bins):.3f} to {max(bins):.3f}",
        f"was {evaluation['evaluation_dense_logprob_abs_diff']:.3f}",
        f"was {evaluation['sparse_dense_logprob_abs_diff']:.3f}",
        f"of {kl:.4f} from the trainer",
        # E|x| of a normal x is sqrt(2 / pi) of its standard deviation.
        f"so {math.sqrt(2 / math.pi) * math.sqrt(2 * kl):.3f}",
    ):
        assert words in page
    assert min(bins) > 0.86


def test_rollouts_are_written_when_slime_fails_but_none_of_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps = tmp_path / "details" / "rollout_data"

    def dump(rollout: int) -> None:
        dumps.mkdir(parents=True, exist_ok=True)
        torch.save({"samples": [sample(5, 0.5, 10.0, [])]}, dumps / f"{rollout}.pt")

    @contextmanager
    def slime(command: Any, log: Path, *_: Any) -> Iterator[Any]:
        dump(0)
        log.write_text("out of memory")
        yield SimpleNamespace(wait=lambda limit: None, returncode=1)

    dump(1)
    monkeypatch.setattr(slime_runs, "logged_process", slime)
    monkeypatch.setattr(slime_runs, "sparse_servers", lambda *_: nullcontext(["http://x:1"]))
    monkeypatch.setattr(slime_runs, "slime_command", lambda *_: [])
    options = SimpleNamespace(work=tmp_path, slots=1, recipe=FOLDER, slime=tmp_path)
    options.rollouts, options.limit = 2, 1
    results = Results(tmp_path / "out.json")
    with pytest.raises(ProcessFailed, match="(?s)status 1:.*out of memory"):
        slime_runs.run(options, "model", results)  # type: ignore[arg-type]
    assert [row["rollout"] for row in results.rows] == ["0"]


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        slime_runs.main([str(FOLDER), "--slime", str(tmp_path)])
    assert "expected a checkout of slime, with train.py" in capsys.readouterr().err


def test_the_result_records_slimes_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slime, out = tmp_path / "slime", tmp_path / "out.json"
    slime.mkdir()
    (slime / "train.py").touch()
    arguments = [str(FOLDER), "--slime", str(slime), "--out", str(out), "--model", str(tmp_path)]
    monkeypatch.setattr(slime_runs, "version", lambda name: "1.0")
    monkeypatch.setattr(slime_runs, "run", lambda *_: None)
    monkeypatch.setattr(slime_runs, "model_folder", str)

    def recorded(*more: str) -> str:
        assert slime_runs.main([*arguments, *more]) == 0
        commit: str = json.loads(out.read_text())["frameworks"]["slime"]
        return commit

    with pytest.raises(SystemExit):
        slime_runs.main(arguments)
    assert "is not a git clone" in capsys.readouterr().err and not out.exists()
    assert recorded("--slime-commit", "624b824") == "624b824"
    who = ["-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init"], ["add", "train.py"], [*who, "commit", "-m", "c"], ["tag", "v1"]):
        subprocess.run(["git", *words], cwd=slime, check=True, capture_output=True)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=slime, text=True)
    # The commit is recorded, not a tag, whatever --slime-commit says.
    assert recorded("--slime-commit", "other") == head[:12]
    (slime / "train.py").write_text("changed")
    assert recorded() == f"{head[:12]}-dirty"


def test_reward_is_the_share_of_words() -> None:
    spec = importlib.util.spec_from_file_location("slime_words", FOLDER / "task.py")
    assert spec is not None and spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    answer = SimpleNamespace(response="The RIVER ran. Stones!", label="river, stone")
    assert run(task.reward(None, answer)) == 0.5
