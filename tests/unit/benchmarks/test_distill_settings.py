"""The comparison of adapters on recorded responses: its losses, what it skips, what it refuses."""

import argparse
import json

import numpy as np
import pytest
import torch
from ascii_task import save_model_of_bytes
from distillation import SCHEDULE, SEQUENCES, new_policy, settings
from engines import random_prompt, save_tiny_model
from scipy.special import rel_entr, softmax

from sparrow_sglang.benchmarks import tables
from sparrow_sglang.benchmarks.result_files import RESULTS, ROOT
from sparrow_sglang.benchmarks.training import (
    adapter_steps,
    distill_settings,
    recorded_responses,
)
from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.rl.distill import SparseAdapter
from sparrow_sglang.rl.policy.sparse_policy import SparseRule


def test_divergences_equal_scipys():
    draw = np.random.default_rng(0)
    # Distributions from alike to far apart, so that some tokens lie in the band, some outside.
    dense = 3 * draw.standard_normal((40, 30))
    sparse = dense + np.linspace(0.01, 6, 40)[:, None] * draw.standard_normal((40, 30))
    p, q = softmax(sparse, axis=1), softmax(dense, axis=1)
    alpha = np.minimum(p, q).sum(1)
    reverse = rel_entr(p, q).sum(1)
    inside = (alpha >= 0.3) & (alpha <= 0.95)
    assert 5 < inside.sum() < 35
    expected = {
        "forward_kl": rel_entr(q, p).sum(1),
        "total_variation": 1 - alpha,
        "clamped": np.minimum(reverse, 1.0),
        "band": reverse * inside,
    }
    for name, values in expected.items():
        found = adapter_steps.DIVERGENCES[name](torch.tensor(sparse), torch.tensor(dense))
        np.testing.assert_allclose(found, values, rtol=1e-9, atol=1e-12)


def test_an_adapter_on_sparse_tokens_leaves_what_precedes_them_as_it_is(sharp_llama):
    policy = new_policy(sharp_llama)
    adapter = SparseAdapter(policy, settings(lr=1e-2))
    for _ in range(2):
        adapter.step(SEQUENCES, SCHEDULE)
    policy.model.eval()
    (packed,) = policy.micro_batches(SEQUENCES)
    rule = SparseRule(SCHEDULE, packed.prompt_lengths)
    with torch.no_grad():
        plain = policy.hidden(packed, rule)
        with adapter_steps.acting_on(policy, packed, SCHEDULE, True), adapter.enabled():
            found = policy.hidden(packed, rule)
    same = (found == plain).all(1)
    # The longer sequence is packed first. Attention is sparse after a prompt, from 49 cached
    # tokens on.
    spans = ((120, 180), (20, 170))
    expected = [n <= max(prompt, 48) for prompt, end in spans for n in range(prompt, end)]
    assert same.tolist() == expected


def test_a_run_goes_on_with_the_settings_that_are_missing(tmp_path, capsys):
    save_model_of_bytes(tmp_path)
    model = save_tiny_model(tmp_path, spread=0.15)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    rows = [{"input_ids": random_prompt(i, 30)} for i in range(3)]
    # One row has a given response; those of the others are sampled.
    rows[0]["response"] = random_prompt(9, 40)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", model, "--prompts", str(prompts), "--out", str(out)]
    words += ["--schedule", "fixed-48", "--new-tokens", "24"]
    words += ["--steps", "2", "--responses", "1", "--heldout", "1"]
    assert distill_settings.main([*words, "--settings", "lr=1e-3"]) == 0
    first = json.loads(out.read_text())
    more = ["lr=1e-3", "lr=1e-3,decay=true,modules=vo"]
    assert distill_settings.main([*words, "--settings", *more]) == 0
    second = json.loads(out.read_text())
    assert second["rows"][0] == first["rows"][0] and second["before"] == first["before"]
    assert [row["setting"]["modules"] for row in second["rows"]] == ["qkvo", "vo"]
    assert second["before"]["tails"][0]["tokens"] == 40
    results = tmp_path / RESULTS / "distill_settings.json"
    results.parent.mkdir(parents=True)
    results.write_text(out.read_text())
    table = [line.split(" | ") for line in tables.generate(tmp_path).splitlines() if "lr 0" in line]
    for cells, row, named in zip(table, second["rows"], ("", " with decay, v and o"), strict=True):
        assert cells[2].startswith(f"top_k, lr 0.001{named}")
        assert cells[3] == f"{row['after']['kl']:.4f}"
    for wrong, named in (
        ([*words, "--steps", "1"], "measured with other settings"),
        (
            [*words, "--heldout", "2"],
            "has 3 prompts; expected 4 or more, for --heldout 2 and --steps 2 of --responses 1",
        ),
        ([*words, "--settings", "loss=nothing"], "loss"),
        ([*words, "--settings", "speed=1"], "unknown key"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            distill_settings.main(wrong)
        line = capsys.readouterr().err.splitlines()[-1]
        assert named in line


def test_no_response_to_a_heldout_prompt_is_trained_on(tmp_path):
    save_model_of_bytes(tmp_path)
    model = save_tiny_model(tmp_path)
    file = tmp_path / "prompts.jsonl"
    # Each of five prompts has two responses, which are five rows apart.
    rows = [{"input_ids": [3 + i % 5] * 9, "response": [40 + i, 50]} for i in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = argparse.Namespace(prompts=file, heldout=2, context=100, new_tokens=4)
    found = recorded_responses.prompts_for(options, model, 6, "--steps 6")
    assert [(p.input_ids[0], p.response_ids[0] - 40) for p in found] == [
        (3, 0), (4, 1), (5, 2), (6, 3), (7, 4), (5, 7), (6, 8), (7, 9),
    ]  # fmt: skip
    with pytest.raises(CalibrationError, match="has 8 prompts; expected 9 or more"):
        recorded_responses.prompts_for(options, model, 7, "--steps 7")


def test_the_figures_in_the_documentation_are_the_results():
    content = json.loads((ROOT / RESULTS / "h200/distill_settings_smollm2-135m.json").read_text())
    plain = {
        row["setting"]["lr"]: row
        for row in content["rows"]
        if row["setting"] == distill_settings.Setting(lr=row["setting"]["lr"]).model_dump()
    }
    after = {lr: row["after"]["lowest_tail"] for lr, row in plain.items()}
    dense = {lr: row["dense"]["lowest_tail"] for lr, row in plain.items()}
    page = " ".join((ROOT / "docs/training.md").read_text("utf-8").split())
    for words in (
        f"from {content['before']['lowest_tail']:.3f} to {after[1e-3]:.3f};",
        f"3e-4 raised it to {after[3e-4]:.3f}, 1e-4 to {after[1e-4]:.3f}",
        f"and 5e-5 to {after[5e-5]:.3f}",
        f"a lowest tail of {dense[1e-3]:.3f} at 1e-3 and of {dense[5e-5]:.3f} at 5e-5",
    ):
        assert words in page
