"""Matrices on the query side of page scores: what they learn, what they keep, the benchmark."""

import json

import numpy as np
import pytest
import torch
from ascii_task import save_model_of_bytes
from engines import random_prompt, save_tiny_model
from scipy.special import rel_entr, softmax

from sparrow_sglang.benchmarks import tables
from sparrow_sglang.benchmarks.result_files import RESULTS, ROOT
from sparrow_sglang.benchmarks.training import learned_selection
from sparrow_sglang.benchmarks.training.query_matrices import (
    LearningRule,
    MeasuredRule,
    QueryMatrices,
    attention_by_page,
    score_divergence,
)
from sparrow_sglang.rl.policy.sparse_policy import SparseRule
from sparrow_sglang.schedule import BudgetSchedule

DIM, PAGE, LENGTH, PROMPT = 16, 16, 384, 128
SCHEDULE = BudgetSchedule(
    name="t", page_size=PAGE, bin_tokens=PAGE, budget_tokens=(96,), dense_layers=()
)
LATE = ((PROMPT, LENGTH),)


def spread_pages(seed):
    """Queries [1, 4, R, D] and keys [1, 2, T, D] of pages that differ in how far keys lie apart.

    Pages whose keys lie far apart get most attention. Channel 0 of the keys is a page's spread;
    queries are 0 in channel 0 and 1 in channel 1, so that only a matrix can score by the spread.
    """
    draw = np.random.default_rng(seed)
    spread = draw.uniform(0, 2.5, (2, LENGTH // PAGE, 1))
    noise = draw.standard_normal((2, LENGTH // PAGE, PAGE, DIM - 2))
    noise -= 0.8 * noise.mean(2, keepdims=True)
    key = np.zeros((2, LENGTH, DIM))
    key[..., 2:] = (spread[..., None] * noise).reshape(2, LENGTH, DIM - 2)
    key[..., 0] = np.repeat(spread[..., 0], PAGE, axis=1)
    query = np.zeros((4, LENGTH - PROMPT, DIM))
    query[..., 2:] = 1.5 * draw.standard_normal((4, LENGTH - PROMPT, DIM - 2))
    query[..., 1] = 1
    return tuple(torch.tensor(x, dtype=torch.float32)[None] for x in (query, key))


def recall_of(query, key, matrices):
    """Attention kept, kept between sink and recent pages, and all between: means over KV heads.

    Computed in float64 loops. The best pages have the largest products of the mean query, after
    the KV head's matrix, and the page's mean key.
    """
    query, key = query[0].double().numpy(), key[0].double().numpy()
    shares = np.zeros((3, LENGTH - PROMPT))
    for row, t in enumerate(range(PROMPT, LENGTH)):
        for head in range(2):
            group = query[2 * head : 2 * head + 2, row]
            weights = softmax(group @ key[head, : t + 1].T / DIM**0.5, axis=1).mean(0)
            pages = t // PAGE + 1
            mass = [weights[p * PAGE : p * PAGE + PAGE].sum() for p in range(pages)]
            means = key[head].reshape(-1, PAGE, DIM).mean(1)
            scores = means[:pages] @ (group.mean(0) @ matrices[head])
            between = range(1, pages - 2)
            best = sorted(between, key=lambda p: -scores[p])[:3]
            always = [0, pages - 2, pages - 1]
            shares[:, row] += [
                sum(mass[p] for p in chosen) / 2 for chosen in (best + always, best, between)
            ]
    return shares


def kept_under(matrices, query, key, **fields):
    rule = MeasuredRule(SCHEDULE, (PROMPT,), matrices=matrices, **fields)
    list(rule.selected_pages(query, key, LATE, 0))
    assert rule.first == [PROMPT]
    return rule.kept[0].numpy()


def test_matrices_learn_which_pages_get_attention():
    matrices = QueryMatrices(1, 2, DIM, torch.device("cpu"))
    optimizer = torch.optim.Adam([matrices.values], lr=0.03)
    draw, first, last = torch.Generator().manual_seed(0), [], []
    for step in range(60):
        optimizer.zero_grad()
        rule = LearningRule(SCHEDULE, (PROMPT,), [(SCHEDULE, matrices)], 128, draw)
        (kept,) = rule.selected_pages(*spread_pages(step % 4), LATE, 0)
        assert kept.all() and kept.shape == (1, 2, LENGTH - PROMPT, LENGTH // PAGE)
        optimizer.step()
        (first if step < 4 else last).append(float(rule.losses[0]))
    assert np.mean(last[-4:]) < 0.8 * np.mean(first)
    matrices.values.requires_grad_(False)
    query, key = spread_pages(99)
    before = kept_under(None, query, key)
    after = kept_under(matrices, query, key)
    np.testing.assert_allclose(before, recall_of(query, key, [np.eye(DIM)] * 2), atol=1e-4)
    np.testing.assert_allclose(after, recall_of(query, key, matrices.values[0].numpy()), atol=1e-4)
    oracle = kept_under(None, query, key, by_attention=True)
    recalls = [kept[1].sum() / kept[2].sum() for kept in (before, after, oracle)]
    # The matrices gain more than half of what the best choice of pages could gain.
    assert recalls[1] > recalls[0] + 0.5 * (recalls[2] - recalls[0]) and recalls[2] > recalls[1]


def test_the_divergence_is_scipys():
    query, key = spread_pages(0)
    draw = torch.Generator().manual_seed(1)
    matrices = QueryMatrices(1, 4, DIM, torch.device("cpu"))
    matrices.values.data += 0.3 * torch.randn(matrices.values.shape, generator=draw)
    positions = torch.arange(PROMPT, LENGTH)[None]
    attention = attention_by_page(query, key, positions, PAGE)
    found = score_divergence(SCHEDULE, matrices, query, key, positions, attention, 0)
    changed = torch.einsum("hrd,hde->hre", query[0], matrices.values[0]).detach().double().numpy()
    means = key[0].double().numpy().reshape(2, -1, PAGE, DIM).mean(2)
    expected = []
    for row, t in enumerate(range(PROMPT, LENGTH)):
        between = slice(1, t // PAGE + 1 - 2)
        for head in range(2):
            scores = means[head, between] @ changed[2 * head : 2 * head + 2, row].mean(0)
            mass = attention[0, head, row, between].double().numpy()
            kl = rel_entr(mass / mass.sum(), softmax(scores / DIM**0.5)).sum()
            expected.append(mass.sum() * kl)
    assert float(found.detach()) == pytest.approx(np.mean(expected), rel=1e-4)


def test_identities_choose_what_the_rule_chooses():
    query, key = spread_pages(3)
    identity = QueryMatrices(1, 2, DIM, torch.device("cpu"))
    plain = SparseRule(SCHEDULE, (PROMPT,)).selected_pages(query, key, LATE, 0)
    measured = MeasuredRule(SCHEDULE, (PROMPT,), matrices=identity)
    for ours, theirs in zip(measured.selected_pages(query, key, LATE, 0), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_measures_every_selection_and_goes_on(tmp_path, capsys):
    save_model_of_bytes(tmp_path)
    model = save_tiny_model(tmp_path, spread=0.15)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    rows = [
        {"input_ids": random_prompt(i, 60), "response": random_prompt(9 + i, 100)} for i in range(4)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", model, "--prompts", str(prompts), "--out", str(out), "--budgets", "64"]
    words += ["--responses", "2", "--passes", "2", "--heldout", "2", "--bin-tokens", "64"]
    words += ["--adapter-steps", "1"]
    assert learned_selection.main(words) == 0
    content = json.loads(out.read_text())
    names = [(row["rule"], row["scores"], row["adapter"]) for row in content["rows"]]
    rules = [
        (rule, scores, 0)
        for rule in ("published", "int4")
        for scores in ("query", "kv_head", "query_head")
    ]
    adapted = [
        (rule, scores, 1) for rule in ("published", "int4") for scores in ("query", "kv_head")
    ]
    assert names == [("oracle", "attention", 0), *rules, *adapted]
    oracle, *others = content["rows"][:7]
    assert all(row["recall"]["mean"] < oracle["recall"]["mean"] for row in others)
    assert all(row["recall_ranked"]["mean"] < oracle["recall_ranked"]["mean"] for row in others)
    assert oracle["tails"][1]["tokens"] == 2 * 64 and len(content["learned"]["matrices"]) == 4
    out.write_text(json.dumps(content | {"rows": content["rows"][:-1]}))
    assert learned_selection.main(words) == 0
    again = json.loads(out.read_text())["rows"]
    assert again[:-1] == content["rows"][:-1]
    assert again[-1]["recall"]["mean"] == pytest.approx(content["rows"][-1]["recall"]["mean"])
    results = tmp_path / RESULTS / "learned_selection.json"
    results.parent.mkdir(parents=True)
    results.write_text(out.read_text())
    table = [
        line.split(" | ") for line in tables.generate(tmp_path).splitlines() if " | 64 | " in line
    ]
    assert [cells[5] for cells in table] == [f"{row['kl']:.4f}" for row in again]
    assert table[0][2:4] == ["oracle", "attention"] and table[-1][2] == "int4, adapter"
    with pytest.raises(SystemExit):
        learned_selection.main([*words, "--budgets", "96"])
    assert "measured with other settings" in capsys.readouterr().err


def test_the_figures_in_the_documentation_are_the_results():
    content = json.loads((ROOT / RESULTS / "h200/learned_selection_smollm2-135m.json").read_text())
    rows = {(row["rule"], row["scores"], row["budget_tokens"]): row for row in content["rows"]}
    rules, budgets = ("published", "int4"), (128, 256)

    def gains(pairs):
        """Least and largest gain in tail, over bins, of the second row of a pair over the first."""
        found = [
            new["tail"] - old["tail"]
            for first, second in pairs
            for old, new in zip(rows[first]["tails"], rows[second]["tails"], strict=True)
        ]
        return min(found), max(found)

    learned = gains(((r, "query", b), (r, "kv_head", b)) for r in rules for b in budgets)
    oracle = gains(((r, "query", b), ("oracle", "attention", b)) for r in rules for b in budgets)
    twice = gains(((r, "query", 128), (r, "query", 256)) for r in rules)
    recall = {key: row["recall_ranked"]["mean"] for key, row in rows.items()}
    int4, published = (
        "{:.3f} instead of {:.3f}".format(recall[rule, "kv_head", 256], recall[rule, "query", 256])
        for rule in ("int4", "published")
    )
    page = " ".join((ROOT / "docs/selection.md").read_text("utf-8").split())
    for words in (
        f"{int4} of the attention there under int4 landmarks, and {published} under the published",
        "by {:.3f} to {:.3f}, but the intervals overlap".format(*learned),
        "gave {:.2f} to {:.2f} more".format(*oracle),
        "twice the budget {:.2f} to {:.2f}".format(*twice),
    ):
        assert words in page
