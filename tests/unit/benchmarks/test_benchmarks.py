"""The benchmarks' arithmetic and command lines, and the tables of what they measured."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import refusal

from sparrow_sglang.benchmarks import tables
from sparrow_sglang.benchmarks.kernels import kernel_times
from sparrow_sglang.benchmarks.options import known_models
from sparrow_sglang.benchmarks.result_files import RESULTS, load_runs
from sparrow_sglang.benchmarks.rollouts import rollout_replay, serving
from sparrow_sglang.benchmarks.steps import decode_step
from sparrow_sglang.benchmarks.steps.decode_step import (
    batch_lengths,
    memory_gb,
    model_shape,
    routes_alike,
    speedups,
    step_bytes,
)
from sparrow_sglang.benchmarks.tables import generate
from sparrow_sglang.commands import cli
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.report.page import ReportError
from sparrow_sglang.report.result_files import Run, rerun_command
from sparrow_sglang.report.step_pairs import model_size, pair_rows
from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.schedule_names import load_schedule

RUNS = load_runs(tables.ROOT, "step_ms")


def row(backend: str, step_ms: float, case: str = "2x1000", **fields: Any) -> dict[str, Any]:
    lengths = batch_lengths(case)
    return {
        "model": "qwen3-4b",
        "backend": backend,
        "case": case,
        "batch": len(lengths),
        "cached_tokens": sum(lengths),
        "step_ms": step_ms,
        "schedule": "fixed-512" if backend == "sparrow" else None,
        "floor_ms": 1.0,
        "tokens_per_s": len(lengths) / step_ms * 1e3,
    } | fields


def save(root: Path, name: str, rows: list[dict[str, Any]], **fields: Any) -> None:
    path = root / RESULTS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    packages = {"sglang": "0.5.17", "torch": "2.11.0", "triton": None, "flashinfer-python": "0.6"}
    content = {
        "device": "NVIDIA H200",
        "packages": packages,
        "commit": "abc",
        "command": "decode_step.py --cases 2x1000 --out /x/y.json",
        "copy_bandwidth": 4.28e12,
        "rows": rows,
    }
    path.write_text(json.dumps(content | fields))


# -- committed results


def test_the_page_shows_what_was_measured() -> None:
    page = (tables.ROOT / tables.PAGE).read_text(encoding="utf-8")
    assert tables.replace_tables(page, generate()) == page, f"run: {tables.COMMAND}"


def test_there_are_results() -> None:
    assert any(each["backend"] == "sparrow" for run in RUNS for each in run.rows)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.path)
def test_committed_rows_are_consistent(run: Run) -> None:
    for each in run.rows:
        lengths = batch_lengths(each["case"])
        assert (each["batch"], each["cached_tokens"]) == (len(lengths), sum(lengths))
        schedule = None
        if each["schedule"]:
            own = tables.ROOT / "benchmarks" / "schedules" / Path(each["schedule"]).name
            schedule = load_schedule(str(own) if own.exists() else each["schedule"], 16)
        shape = model_shape(each["model"], each.get("kv_cache_dtype", "auto"))
        same_experts = each.get("same_experts", False)
        expected = step_bytes(shape, lengths, schedule, each.get("tp", 1), same_experts)
        assert each["bytes"] == pytest.approx(expected, rel=1e-3)
        floor_ms = each["bytes"] / each["bandwidth_tb_s"] / 1e9
        assert each["floor_ms"] == pytest.approx(floor_ms)
        assert each["tokens_per_s"] == pytest.approx(each["batch"] / each["step_ms"] * 1e3)


# -- bytes and cases


def test_bytes_of_a_step_by_hand() -> None:
    shape = ModelShape(
        8, 16, num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=4, vocab_size=10
    )
    # Per layer q and o: 2 * 8 * 16, k and v: 2 * 8 * 8, MLP: 3 * 8 * 16; vocabulary: 10 * 8.
    weights = 2 * (3 * (256 + 128 + 384) + 80)
    # A token's KV in one layer: 2 heads * 4 wide * keys and values * 2 bytes.
    kv = 32
    assert step_bytes(shape, [100, 40], None) == weights + 3 * 140 * kv
    # Budget of 4 pages, layers 0 and 1 dense. 100 tokens are 7 pages: 3 full ones and the last with
    # 4 tokens are read, and 7 - 1 - 2 landmarks of half a token's KV; 40 tokens are read in full.
    sparse = (3 * 16 + 4 + 40) * kv + 4 * kv // 2
    schedule = BudgetSchedule.fixed(64)
    assert step_bytes(shape, [100, 40], schedule) == weights + 2 * 140 * kv + sparse
    # An FP8 cache has KV of half the size, and landmarks of the same size.
    halved = replace(shape, kv_itemsize=1)
    landmarks = 4 * kv // 2
    fp8 = weights + (2 * 140 * kv + sparse - landmarks) / 2 + landmarks
    assert step_bytes(halved, [100, 40], schedule) == fp8


def test_every_gpu_reads_its_part_of_a_step() -> None:
    shape = model_shape("qwen3-8b")
    whole = step_bytes(shape, [1000, 400], BudgetSchedule.fixed(64))
    assert step_bytes(shape, [1000, 400], BudgetSchedule.fixed(64), ranks=2) == whole / 2


def test_experts_that_a_step_does_not_read_are_in_memory_all_the_same() -> None:
    shape = model_shape("qwen3-30b-a3b")
    # 30.2 billion weights of 2 bytes; a token's KV takes 48 layers * 4 heads * 128 * 2 * 2 bytes.
    assert memory_gb(shape, [32768] * 16, 1) == pytest.approx(60.4 + 51.5, abs=0.2)
    assert memory_gb(shape, [32768] * 16, 2) == pytest.approx((60.4 + 51.5) / 2, abs=0.2)


def test_a_floor_counts_the_experts_that_dummy_weights_choose() -> None:
    assert [model for model in known_models() if routes_alike(model)] == ["gpt-oss-20b"]
    shape, lengths = model_shape("gpt-oss-20b"), [32768] * 16
    even = step_bytes(shape, lengths, None)
    same = step_bytes(shape, lengths, None, same_experts=True)
    # In each of 24 layers, 4 of 32 experts instead of the expected 32 * (1 - (1 - 4/32)^16).
    experts = 24 * (32 * (1 - (7 / 8) ** 16) - 4)
    assert even - same == pytest.approx(2 * 3 * 2880 * 2880 * experts)
    rows = [each for run in RUNS for each in run.rows if each["model"] == "gpt-oss-20b"]
    # The page gives both floors of the older result, whose rows have no `same_experts`.
    [sparse] = [each for each in rows if each["schedule"] and "same_experts" not in each]
    [newer] = [each for each in rows if each["schedule"] and each.get("same_experts")]
    schedule = load_schedule(sparse["schedule"], 16)
    floor_ms = step_bytes(shape, lengths, schedule, same_experts=True)
    floor_ms /= sparse["bandwidth_tb_s"] * 1e9
    page = " ".join((tables.ROOT / tables.PAGE).read_text("utf-8").split())
    assert f"floor of {sparse['floor_ms']:.2f} ms assumes an even choice" in page
    assert f"With four experts it is {floor_ms:.2f} ms" in page
    assert f"with a floor of {newer['floor_ms']:.2f} ms" in page


def test_cases() -> None:
    assert batch_lengths("3x1000") == [1000] * 3
    lengths = batch_lengths("fill:1024-8192:100000")
    assert lengths == batch_lengths("fill:1024-8192:100000")
    assert 1024 <= min(lengths) < 3000 and 6000 < max(lengths) <= 8192
    assert 100_000 - 2 * 8192 < sum(lengths) <= 100_000


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("", "expected BATCHxLENGTH or fill"),
        ("16", "expected BATCHxLENGTH or fill"),
        ("16x", "expected BATCHxLENGTH or fill"),
        ("-1x1000", "expected BATCHxLENGTH or fill"),
        ("1x2x3", "expected BATCHxLENGTH or fill"),
        ("fill:1024:9000", "expected BATCHxLENGTH or fill"),
        ("0x1000", "1 or more sequences"),
        ("1x144", "lengths of 145 to 131072"),
        ("1x131073", "lengths of 145 to 131072"),
        ("fill:2000-1000:90000", "the shorter first"),
        ("fill:1000-2000:2000", "more than one sequence of 2000 tokens"),
    ],
)
def test_nonsense_cases_are_refused(case: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"case {case!r}.*{message}"):
        batch_lengths(case)


# -- pairs of dense and sparse rows


def test_speedups_are_over_the_fastest_dense_row_of_model_and_case() -> None:
    rows = [
        row("flashinfer", 9.0),
        row("fa3", 8.0),
        row("flashinfer", 1.0, model="qwen3-8b"),
        row("flashinfer", 2.0, case="4x1000"),
        row("sparrow", 4.0),
        row("sparrow", 2.0, schedule="fixed-1024"),
        row("sparrow", 3.0, case="8x1000"),
    ]
    found = [(each["schedule"], each["dense_ms"], each["speedup"]) for each in speedups(rows)]
    assert found == [("fixed-512", 8.0, 2.0), ("fixed-1024", 8.0, 4.0)]


def test_a_model_is_compared_with_itself_served_in_the_same_way() -> None:
    split, fp8 = {"tp": 2, "ep": 1}, {"kv_cache_dtype": "fp8_e4m3"}
    rows = [
        row("flashinfer", 9.0),
        row("flashinfer", 6.0, **split),
        row("fa3", 5.0, tp=2, ep=2),
        row("sparrow", 4.0, **split),
        row("sparrow", 4.5, tp=1, ep=1),
        row("sparrow", 2.0, tp=2, ep=2),
        row("flashinfer", 3.0, **fp8),
        row("sparrow", 1.5, **fp8),
    ]
    found = {each["model"]: (each["dense_ms"], each["speedup"]) for each in speedups(rows)}
    assert found == {
        "qwen3-4b (TP 2)": (6.0, 1.5),
        "qwen3-4b": (9.0, 2.0),
        "qwen3-4b (TP 2, EP 2)": (5.0, 2.5),
        "qwen3-4b (FP8 KV)": (3.0, 2.0),
    }


@pytest.mark.parametrize(
    ("model", "billions"), [("qwen3-1.7b", 1.7), ("qwen3-30b-a3b", 30.0), ("smollm2-135m", 0.0)]
)
def test_sizes_by_which_models_are_ordered(model: str, billions: float) -> None:
    assert model_size(model) == model_size(f"{model} (TP 2)") == billions


def test_pairs_across_files_of_one_device(tmp_path: Path) -> None:
    save(tmp_path, "h200/a.json", [row("flashinfer", 8.0)])
    save(tmp_path, "h200/b.json", [row("sparrow", 4.0)])
    save(tmp_path, "h200/c.json", [row("flashinfer", 9.0), row("sparrow", 3.0)])
    save(tmp_path, "h100/d.json", [row("sparrow", 5.0)], device="NVIDIA H100")
    other = {"sglang": "0.5.16", "torch": "2.11.0", "triton": None, "flashinfer-python": "0.6"}
    save(tmp_path, "h200/e.json", [row("sparrow", 6.0)], packages=other)
    pairs = pair_rows(load_runs(tmp_path, "step_ms"))
    found = {
        pair.run.path[-6:]: (pair.dense_run and pair.dense_run.path[-6:], pair.speedup)
        for pair in pairs
    }
    # c has a dense row of its own, though a slower one; the H100 and the other SGLang have none.
    assert found == {
        "b.json": ("a.json", 2.0),
        "c.json": ("c.json", 3.0),
        "d.json": (None, None),
        "e.json": (None, None),
    }


# -- tables


def lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_tables_of_steps_and_snapshots(tmp_path: Path) -> None:
    fill = "fill:1024-2048:9000"
    batch = len(batch_lengths(fill))
    save(tmp_path, "a.json", [row("fa3", 8.0), row("flashinfer", 10.0, fill)])
    save(tmp_path, "b.json", [row("sparrow", 3.0), row("sparrow", 4.0, fill, floor_ms=2.0)])
    text = generate(tmp_path)
    assert lines(text, "| qwen3-4b")[0] == (
        "| qwen3-4b | fixed-512 | 2 × 1000 | 8.00 (fa3) | 3.00 | 2.67× | 1.00 | H200 | 0.5.17 | 2,"
        " dense 1 |"
    )
    assert lines(text, "| qwen3-4b")[1] == (
        f"| qwen3-4b | fixed-512 | 1024 to 2048 | {batch} | {sum(batch_lengths(fill)):,} |"
        f" {batch * 100} | {batch * 250:,} | 2.50× | {batch * 500:,} | H200 | 2, dense 1 |"
    )
    save(tmp_path, "c.json", [row("sparrow", 2.0, tp=2), row("fa3", 5.0, tp=2)])
    split = "| qwen3-4b (TP 2) | fixed-512 | 2 × 1000 | 5.00 (fa3) | 2.00 | 2.50× |"
    assert lines(generate(tmp_path), "| qwen3-4b")[1].startswith(split)
    assert lines(text, "2. ") == [
        "2. NVIDIA H200, SGLang 0.5.17, torch 2.11.0, FlashInfer 0.6, commit `abc`,"
        " [results](benchmarks/results/b.json): `sparrow bench step --cases 2x1000`"
    ]


def test_table_of_kernels(tmp_path: Path) -> None:
    rows = [
        {"name": "select", "floor_us": 16.0, "us": 32.0},
        {"name": "decode", "floor_us": 62.0, "failed": "RuntimeError"},
        {"name": "select: torch", "floor_us": 16.0, "us": 400.04},
        {"name": "select: other", "floor_us": 16.0, "failed": "ImportError"},
    ]
    save(tmp_path, "kernels.json", rows, command="kernels.py")
    save(tmp_path, "rule.json", rows[:1], command="kernels.py", selection="int4 landmarks")
    save(tmp_path, "sweep.json", [rows[0] | {"name": "select s1"}], command="kernels.py --sweep")
    save(tmp_path, "audit.json", [{"something": "else"}])
    text = generate(tmp_path)
    published, int4 = text.split("<details>")[1:]
    assert "<summary>Kernels on one H200: published selection rule</summary>" in published
    assert lines(published, "| ")[2:] == [
        "| select | 16.0 | 32.0 | 50% | torch 400.0; other failed |",
        "| decode | 62.0 | failed | – | – |",
    ]
    assert "<summary>Kernels on one H200: int4 landmarks</summary>" in int4
    assert "copy 4.28 TB/s; NVIDIA H200" in text and "`sparrow bench kernels`" in text


def test_tables_of_training_steps_and_audits(tmp_path: Path) -> None:
    step = {"dtype": "float32", "tokens": 32768, "weights_gib": 6.44, "step_peak_gib": 71.25}
    step |= {"step_s": [12.5, 12.25], "score_s": 3.0, "idle_gib": 30.0, "warm_up_s": 20.0}
    step |= {"adapter_peak_gib": 40.04, "adapter_step_s": [9.0, 8.5]}
    command = "train_memory.py --tokens 32768 --out /x/train.json"
    sharded = {"dtype": "bfloat16", "tokens": 1000, "ranks": 2, "sequences": 3, "offload": True}
    sharded |= {"weights_gib": 3.4, "step_peak_gib": 20.0, "step_s": [0.5], "score_s": 0.1}
    sharded |= {"peak_share": 0.416, "gather_s": 0.75}
    save(tmp_path, "train.json", [step, sharded], model="qwen3-1.7b", command=command)
    rounds = [
        {"rate": rate, "tokens_per_s": speed, "pair": pair, "served_s": 1.0}
        for pair, (without, audited) in enumerate([(1000.0, 990.0), (1200.0, 1194.0)])
        for rate, speed in ((0.0, without), (0.01, audited))
    ]
    settings = {"model": "qwen3-4b", "schedule": "fixed-1024", "rate": 0.01}
    settings |= {"requests": 512, "new_tokens": 1024}
    fields = {"settings": settings, "lost": [0.01, 0.005], "command": "audit_overhead.py"}
    save(tmp_path, "audit.json", rounds, **fields)
    text = generate(tmp_path)
    assert lines(text, "| qwen3") == [
        "| qwen3-1.7b | float32 | 1 | 1 × 32,768 | 6.4 | 71.2 | 12.25 | 2,675 | – | 3.00 | –"
        " | 40.0 | 8.50 | H200 | 1 |",
        "| qwen3-1.7b | bfloat16, offloaded | 2 | 3 × 1,000 | 3.4 | 20.0 | 0.50 | 6,000 | 42%"
        " | 0.10 | 0.75 | – | – | H200 | 1 |",
        "| qwen3-4b | fixed-1024 | 1.0% | 512 × 1024 | 1,100 | 1,092 | 0.75% | H200 | 1 |",
    ]
    start = "`python -m sparrow_sglang.benchmarks."
    assert (
        f"{start}training.train_memory --tokens 32768`" in text
        and f"{start}rollouts.audit_overhead`" in text
    )


def test_table_of_slimes_loop(tmp_path: Path) -> None:
    rollout = {"rollout": "0", "responses": 64, "length_mean": 2048.0, "seconds": 8.04}
    rollout |= {"tokens_per_s": 16302.5, "weight_versions": ["1"], "recorded": 8}
    rollout |= {"accept_p05": 0.9056, "accept_p05_bin0": 0.9, "accept_p05_bin1": 0.875}
    evaluation = {"rollout": "eval_0", "responses": 8, "length_mean": 100.0, "seconds": 1.0}
    evaluation |= {"tokens_per_s": 800.0, "weight_versions": ["2"]}
    evaluation |= {"evaluation_dense_logprob_abs_diff": 0.0388}
    evaluation |= {"sparse_dense_logprob_abs_diff": 0.0782}
    settings = {"model": "smollm2-135m", "schedule": "x/mine.json", "servers": 2}
    fields = {"settings": settings, "command": "slime_runs.py examples/slime"}
    save(tmp_path, "slime.json", [rollout, evaluation], **fields)
    text = generate(tmp_path)
    assert lines(text, "| smollm2") == [
        "| smollm2-135m | mine | 2 | 0 | 64 | 2,048 | 8.0 | 16,302 | 8 | 0.906 | 0.900, 0.875"
        " | H200 | 1 |",
        "| smollm2-135m | dense | 2 | evaluation | 8 | 100 | 1.0 | 800 | – | – | – | H200 | 1 |",
    ]
    assert "Run 1: 0.039 for the evaluation, 0.078 for sparse responses" in text


def test_table_of_verls_runs(tmp_path: Path) -> None:
    curves = {
        "critic/score/mean": [[1, 0.1], [2, 0.2], [3, 0.4]],
        "response_length/mean": [[1, 9.0], [2, 2000.0], [3, 2048.0]],
        "sparrow/accept_p05": [[2, 0.9], [3, 0.88]],
        "rollout_corr/kl": [[2, 0.01], [3, 0.02]],
        "rollout_corr/rollout_is_mean": [[2, 0.99], [3, 1.0]],
    }
    seconds = {"step": 9.0, "gen": 5.0, "old_log_prob": 1.0, "update_actor": 2.0}
    row = {"run": "a-seed0", "schedule": "a.json", "seed": 0, "steps": 3, "tokens_per_s": 1500.0}
    row |= {"seconds_per_step": {f"timing_s/{k}": v for k, v in seconds.items()}, "curves": curves}
    plain = {key: curves[key] for key in ("critic/score/mean", "response_length/mean")}
    dense = row | {"schedule": "dense", "curves": plain}
    never = {"schedule": "dense", "seed": 1, "steps": 0, "curves": {}, "seconds_per_step": {}}
    settings = {"model": "smollm2-135m", "parallel": None}
    fields = {"settings": settings, "frameworks": {"verl": "0.9.1"}, "command": "verl_runs.py r"}
    save(tmp_path, "verl.json", [row, dense, never], **fields)
    seconds_shown = "9.0 | 5.0 | 1.0 | 2.0 | 0.0 | 1,500 | 3 | H200 | 1 |"
    assert lines(generate(tmp_path), "| smollm2") == [
        "| smollm2-135m | a | 0 | 3 | 0.200 → 0.400 | 2,024 | 0.890, 0.880 | 0.0150 | 0.995 | "
        + seconds_shown,
        "| smollm2-135m | dense | 0 | 3 | 0.200 → 0.400 | 2,024 | – | – | – | " + seconds_shown,
    ]


def test_table_of_a_further_turn(tmp_path: Path) -> None:
    sparse = {"model": "m", "backend": "sparrow", "schedule": "x/s.json", "turn_tokens": 1024}
    sparse |= {"cached_tokens": 512.0, "prefilled_tokens": 1088.0, "generate_s": 4.0}
    dense = sparse | {"backend": "fa3", "schedule": None, "prefill_s": 0.01}
    save(tmp_path, "turns.json", [sparse | {"prefill_s": 0.1}, dense], command="turn_prefill.py")
    assert lines(generate(tmp_path), "| m ") == [
        "| m | s | 1,024 | 512 | 1,088 | 4.00 | 0.100 | 2.5% | H200 | 1 |",
        "| m | fa3, dense | 1,024 | 512 | 1,088 | 4.00 | 0.010 | 0.2% | H200 | 1 |",
    ]


def test_tables_of_acceptance_rates(tmp_path: Path) -> None:
    def with_interval(**values: float) -> dict[str, float]:
        ends = [(name, value, value - 0.01, value + 0.01) for name, value in values.items()]
        return {
            name + end: value
            for name, *three in ends
            for end, value in zip(("", "_low", "_high"), three, strict=True)
        }

    shares = {"share_above_0.999": 0.25, "share_above_0.99": 0.5, "mean": 0.9, "tail": 0.75}
    every = {"kind": "all tokens", "budget_tokens": 1024, "tokens": 45000, "beta_ks": 0.05}
    every |= {"histogram": [1, 2]} | with_interval(**shares)
    correlation = {"kind": "correlation", "budget_tokens": 1024, "bins": 14}
    correlation |= with_interval(tokens_r=-0.1, tails_r=-0.5)
    bins = [{"kind": "bin", "budget_tokens": 1024, "beta_ks": ks} for ks in (0.07, 0.04, None)]
    none = {"kind": "correlation", "budget_tokens": None, "bins": 16}
    page = {"kind": "difference", "page_size": 32, "schedule": "page32-down", "bins": 14}
    page |= {"bins_lower": 3, "bins_higher": 1} | with_interval(tail_difference=-0.02)
    dense = every | {"budget_tokens": None, "beta_ks": None}
    fields = {"settings": {"reference_budget": 512}, "model": "m"}
    save(
        tmp_path,
        "rates.json",
        [every, correlation, *bins, dense, none, page],
        command="acceptance_distribution.py --seed 1",
        **fields,
    )
    text = generate(tmp_path)
    shown = (
        "0.250 (0.240 to 0.260) | 0.500 (0.490 to 0.510) | 0.900 (0.890 to 0.910)"
        " | 0.750 (0.740 to 0.760)"
    )
    assert lines(text, "| m ") == [
        f"| m | 1,024 | 45,000 | {shown} | 0.050 | 0.040 to 0.070 | -0.100 (-0.110 to -0.090)"
        " | -0.500 (-0.510 to -0.490) | H200 | 1 |",
        f"| m | dense | 45,000 | {shown} | – | – | – | – | H200 | 1 |",
        "| m | 512 | 32 | down | -0.020 (-0.030 to -0.010) | 3 | 1 | 14 | H200 | 1 |",
    ]
    assert "`python -m sparrow_sglang.benchmarks.rollouts.acceptance_distribution --seed 1`" in text


def test_tables_of_what_an_adapter_gains_and_costs(tmp_path: Path) -> None:
    def tails(*values: float) -> list[dict]:
        return [
            {
                "bin": index,
                "first_position": index * 1024,
                "end_position": (index + 1) * 1024,
                "tokens": 5000,
                "tail": value,
                "tail_low": value - 0.01,
                "tail_high": value + 0.01,
            }
            for index, value in enumerate(values)
        ]

    after = {"after": {"responses": 1024}, "given": tails(0.9, 0.87), "bolder": tails(0.85, 0.8)}
    row = {"lr": 1e-3, "trained_under": "fixed-256", "tails": [{}, after]}
    speed = {"requests": 144, "new_tokens": 512, "tokens_per_s": 1000.0, "step_ms": 2.0}
    fields = {
        "settings": {"model": "models/smollm2-135m"},
        "schedules": {"given": {"name": "fixed-512"}, "bolder": {"name": "fixed-256"}},
        "before": {"given": tails(0.85, 0.86), "bolder": tails(0.8, 0.7)},
        "decode": {"merged": speed, "lora": speed | {"tokens_per_s": 800.0, "step_ms": 2.5}},
        "agreement": {"merged": {"mean": 0.9991, "tail": 0.9959}},
        "cost": {"adapter_step_s": 1.5, "dense_update_s": 1.0},
        "command": "distill_gain.py --lr 1e-3",
    }
    save(tmp_path, "gain.json", [row], **fields)
    text = generate(tmp_path)
    one, two, both = "0.850 → 0.900, 0.860 → 0.870", "0.800 → 0.850, 0.700 → 0.800", "2 of 2"
    across = "0.850 → 0.850, 0.860 → 0.800"
    start, end = "| smollm2-135m |", "| H200 | 1 |"
    assert lines(text, start) == [
        f"{start} fixed-512 → fixed-512 | 0.001 | 1024 | {one} | 1 of 2 | {both} {end}",
        f"{start} fixed-256 → fixed-256 | 0.001 | 1024 | {two} | {both} | {both} {end}",
        f"{start} fixed-512 → fixed-256 | 0.001 | 1024 | {across} | 0 of 2 | 1 of 2 {end}",
        f"{start} 144 × 512 | 1,000 | 800 | 2.00 | 2.50 | 0.9991 | 0.9959 | 1.50 | 1.00 {end}",
    ]


def test_a_side_without_its_partner_has_no_speed_up(tmp_path: Path) -> None:
    sparse = {"model": "m", "schedule": "s", "sequences": 8, "output_tokens": 80, "longest": 20}
    sparse |= {"seconds": 4.0, "tokens_per_s": 20.0, "ended_s": []}
    save(tmp_path, "rollout.json", [sparse], command="rollout_replay.py --sequences 8")
    assert lines(generate(tmp_path), "| m ") == [
        "| m | s | 8 | 10 | 20 | – | 4.0 | – | 20 | – | H200 | 1 |"
    ]


def test_commands_can_be_typed_again() -> None:
    recorded = 'decode_step.py --engine-args {"a": true} --schedules {model}-0.75 --out /x/y.json'
    typed = "sparrow bench step --engine-args '{\"a\": true}' --schedules {model}-0.75"
    assert rerun_command(recorded) == typed
    # Newer results record the command as the shell needs it; quoting it again would break it.
    assert rerun_command(f"{typed} --out=/x/y.json") == typed


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "a.json: not JSON"), ('{"rows": [{"step_ms": 1}], "device": ""}', "lacks command, com")],
)
def test_an_unusable_result_is_named(tmp_path: Path, content: str, message: str) -> None:
    save(tmp_path, "a.json", [])
    (tmp_path / RESULTS / "a.json").write_text(content)
    with pytest.raises(ReportError, match=message):
        generate(tmp_path)


def test_only_the_part_between_the_markers_is_rewritten() -> None:
    readme = f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n"
    expected = f"before\n{tables.BEGIN}\nnew\n{tables.END}\nafter\n"
    assert tables.replace_tables(readme, "new") == expected
    # The page lies one folder below the root, from which results are named.
    link = "[results](benchmarks/results/a.json)"
    assert "[results](../benchmarks/results/a.json)" in tables.replace_tables(readme, link)
    for wrong in ("", tables.BEGIN, f"{tables.END}\n{tables.BEGIN}", readme * 2):
        with pytest.raises(ReportError, match="expected one line"):
            tables.replace_tables(wrong, "new")


# -- command lines


@pytest.mark.parametrize("benchmark", cli.BENCHMARKS)
def test_without_a_gpu_one_line_says_what_is_needed(
    benchmark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = refusal(["bench", benchmark], capsys)
    assert error.startswith("no CUDA device found")
    assert re.search(r"about \d\d GB of free memory", error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ep 2", "--ep 2: expected 1, or the GPUs of --tp 1"),
        ("--tp 2 --ep 2", "--ep 2: qwen3-1.7b has no experts"),
        ("--tp 3", "3 tensor-parallel ranks: 8 KV heads cannot be shared"),
        ('--engine-args {"tp_size":2}', "--engine-args tp_size: set --tp instead"),
        ("--models qwen3-30b-a3b", "qwen3-30b-a3b-0.86"),
        ('--engine-args {"kv_cache_dtype":"fp8_e5m2"}', "kv_cache_dtype='fp8_e5m2': expected one"),
    ],
)
def test_splits_that_cannot_be_are_refused(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(["bench", "step", *options.split()], capsys)


def test_more_gpus_than_there_are_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    error = refusal(["bench", "step", "--tp", "2"], capsys)
    assert error == "1 CUDA device found; expected 2 for --tp\n"


def test_the_commands_in_the_help_are_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    Path("lengths.jsonl").write_text("1000\n")
    texts = [re.sub(r"\\\n +", "", cli.BENCH_EPILOG)]
    texts += [each.EXAMPLES for each in (decode_step, kernel_times, rollout_replay, serving)]
    commands = re.findall(r"^  (sparrow bench .*?)(?: {2,}.*)?$", "\n".join(texts), re.M)
    assert len(commands) == 20
    for command in commands:
        with pytest.raises(SystemExit):
            cli.main(shlex.split(command)[1:])
        # The missing GPU is all that is wrong.
        assert "no CUDA device found" in capsys.readouterr().err, command
