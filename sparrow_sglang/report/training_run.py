"""Section of a training run: reward, length, tail, speed and where the time went, by step.

In: the folder of a run, as `sparrow train` writes it. Out: a `Section`.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_sglang.mismatch.collapse import ALARM, ENTROPY, FALL, WINDOW
from sparrow_sglang.mismatch.token_bins import BIN_TOKENS
from sparrow_sglang.report.charts import PALETTE, Chart, Line, ramp
from sparrow_sglang.report.page import (
    Excerpt,
    Figure,
    Section,
    Settings,
    Table,
    flat,
    number,
    provenance,
    reading,
)
from sparrow_sglang.report.run_files import RunFiles, json_lines, read_run
from sparrow_sglang.run_folder import RESPONSES_FILE

_TAIL_OF_BIN = "sparrow/accept_p05_bin"
_OF_SET = re.compile(r"eval/.+/pass_rate$")
_SHOWN_STEPS = 40
_EXCERPT_STEPS = 4
_HEAD, _END = 4000, 2000
_STEP_COLUMNS = {
    "reward": "critic/score/mean",
    "pass rate": "eval/pass_rate",
    "length": "response_length/mean",
    "entropy": ENTROPY,
    "tail": "sparrow/accept_p05",
    "acceptance": "sparrow/accept_mean",
    "KV read": "sparrow/kv_tokens_read",
    "KV cached": "sparrow/kv_tokens_cached",
    "tokens/s": "sparrow/rollout_tokens_per_s",
    "seconds": "timing_s/step",
}

# Title, unit, label of each metric (an empty dict stands for the tails by position) and a note.
_CHARTS: tuple[tuple[str, str, dict[str, str], str], ...] = (
    (
        "Reward",
        "mean reward",
        {"critic/score/mean": "training", "eval/pass_rate": "held out, dense"},
        "",
    ),
    (
        "Response length",
        "tokens",
        {"response_length/mean": "mean", "response_length/max": "longest"},
        "",
    ),
    (
        "Entropy",
        "nats",
        {ENTROPY: "dense policy"},
        f"Per token. An alarm where its mean over {WINDOW} steps is below {FALL:g} of that of the"
        f" first {WINDOW} while the reward is below theirs and the tail above.",
    ),
    (
        "Acceptance rate of the rollouts",
        "acceptance rate",
        {"sparrow/accept_p05": "5th percentile", "sparrow/accept_mean": "mean"},
        "Exact, from both whole distributions of measured tokens.",
    ),
    (
        "Tail by position",
        "acceptance rate",
        {},
        "5th percentile. Bins are those of the schedule, named by their first position.",
    ),
    (
        "Rollout throughput",
        "tokens/s",
        {"sparrow/rollout_tokens_per_s": "rollout"},
        "Response tokens over the seconds of the rollout.",
    ),
    (
        "KV tokens per generated token",
        "KV tokens",
        {"sparrow/kv_tokens_cached": "cached", "sparrow/kv_tokens_read": "read"},
        "What a sparse layer reads of what is cached of the sequence, mean over steps.",
    ),
    (
        "Rollout against dense policy",
        "nats per token",
        {"rollout_corr/k3_kl": "KL", "sparrow/distill_kl": "KL that DistillSparse lowers"},
        "KL(rollout ‖ dense), estimated from sampled tokens (rollout_corr/k3_kl).",
    ),
)
_FROM_ZERO = ("tokens", "nats", "tokens/s", "KV tokens")


def training_section(folder: Path) -> Section:
    """The run in `folder`. Raises `ReportError` if there is no step yet, or a file is damaged."""
    run = read_run(folder)
    return Section(
        kind="training",
        title=f"Training run {folder.resolve().name}",
        facts=_facts(run),
        figures=_figures(run),
        tables=[_step_table(run), *_event_tables(run)],
        settings=_settings(run),
        excerpts=_excerpts(folder),
    )


def _settings(run: RunFiles) -> list[Settings]:
    """The newest configuration, and the versions, repeated where a resumed run has other ones."""
    if not run.starts:
        return []
    settings = [Settings("Configuration", flat(run.config))]
    shown: dict[str, str] = {}
    for start in run.starts:
        versions = provenance(start)
        software = {key: versions[key] for key in versions if key not in ("date", "command")}
        if software != shown:
            since = f" from step {start['step']} on" if shown else ""
            settings.append(Settings(f"Versions{since}", versions))
            shown = software
    return settings


def _facts(run: RunFiles) -> list[tuple[str, str]]:
    steps = run.steps
    last = steps[-1]
    planned = run.config.get("steps")
    facts = [("steps", f"{len(steps):,}" + (f" of {planned:,}" if planned else ""))]

    def change(label: str, name: str) -> None:
        values = [row[name] for row in run.rows if name in row]
        if values:
            facts.append((label, f"{number(values[0], 3)} → {number(values[-1], 3)}"))

    change("reward, first → last", "critic/score/mean")
    change("held-out pass rate", "eval/pass_rate")
    change("mean response length", "response_length/mean")
    change("entropy", ENTROPY)
    change("tail", "sparrow/accept_p05")
    alarms = [row["step"] for row in steps if row.get(ALARM)]
    if alarms:
        facts.append(
            (
                "ALARM, the policy may be collapsing",
                f"{len(alarms):,} steps, the first is {alarms[0]:,}",
            )
        )
    skipped = sum(row.get("actor/skipped_steps", 0.0) for row in steps)
    if skipped:
        facts.append(("optimizer steps skipped, gradient not finite", f"{skipped:,.0f}"))
    if run.schedule:
        facts.append(("schedule", run.schedule))
    if "sparrow/kv_tokens_cached" in last:
        share = last["sparrow/kv_tokens_read"] / last["sparrow/kv_tokens_cached"]
        facts.append(("KV read of cached, last step", f"{share:.1%}"))
    seconds = np.median([row["timing_s/step"] for row in steps])
    facts.append(("seconds per step, median", number(float(seconds))))
    return facts


def _figures(run: RunFiles) -> list[Figure]:
    """A figure for each group of metrics that the run has."""
    limit = run.config.get("rollout", {}).get("max_new_tokens")
    target = run.config.get("ladder", {}).get("target")
    levels = {
        "tokens": [(f"limit {limit:,}", limit)] if limit else [],
        "acceptance rate": [(f"target {target:g}", target)] if target else [],
    }
    moves = _moves(run)
    moved = " Dotted vertical lines: another schedule." if moves else ""
    names = {name for row in run.rows for name in row if name.startswith(_TAIL_OF_BIN)}
    bins = sorted(int(name.removeprefix(_TAIL_OF_BIN)) for name in names)
    width = (run.starts[-1].get("tail_bin_tokens") if run.starts else None) or BIN_TOKENS
    tails = {f"{_TAIL_OF_BIN}{index}": f"{index * width:,}+" for index in bins}
    figures = []
    for title, unit, metrics, note in _CHARTS:
        is_by_bin = not metrics
        metrics = metrics | (_heldout_sets(run) if "eval/pass_rate" in metrics else {})
        labels = {name: text for name, text in (metrics or tails).items() if run.has(name)}
        colours = ramp(len(labels)) if is_by_bin else PALETTE
        lines = []
        for (name, text), colour in zip(labels.items(), colours, strict=False):
            rows = [row for row in run.rows if name in row]
            steps = [row["step"] for row in rows]
            lines.append(Line(text, steps, [row[name] for row in rows], colour))
        chart = Chart(title, "step", unit, lines, levels.get(unit, ()), moves,
                      from_zero=unit in _FROM_ZERO)  # fmt: skip
        figures += [Figure(chart, (note + moved).strip())] if lines else []
    return [*figures, _time(run)]


def _heldout_sets(run: RunFiles) -> dict[str, str]:
    """Labels of the pass rates of single held-out sets."""
    names = {name for row in run.rows for name in row}
    sets = sorted(name.split("/", 1)[1].rpartition("/")[0] for name in names if _OF_SET.match(name))
    return {f"eval/{name}/pass_rate": name for name in sets}


def _time(run: RunFiles) -> Figure:
    """Time of each stage of a step, in order; the rest is the time that no stage measured."""
    steps = run.steps
    names = dict.fromkeys(name for row in steps for name in row if name.startswith("timing_s/"))
    del names["timing_s/step"]
    places = [row["step"] for row in steps]
    spent = [[row.get(name, 0.0) for row in steps] for name in names]
    rest = [
        max(0.0, row["timing_s/step"] - sum(seconds))
        for row, seconds in zip(steps, zip(*spent, strict=True), strict=True)
    ]
    labels = [name.removeprefix("timing_s/") for name in names]
    lines = [
        Line(label, places, seconds, PALETTE[i % len(PALETTE)])
        for i, (label, seconds) in enumerate(zip([*labels, "rest"], [*spent, rest], strict=True))
    ]
    if len(steps) == 1:
        # With one step the areas would have no width, so draw it half a step to either side.
        lines = [Line(ln.label, [places[0] - 0.5, places[0] + 0.5], [*ln.y] * 2, ln.colour)
                 for ln in lines]  # fmt: skip
    title, moves = "Where the time of a step goes", _moves(run)
    return Figure(Chart(title, "step", "seconds", lines, (), moves, stacked=True, from_zero=True))


def _moves(run: RunFiles) -> list[float]:
    """Steps after which another schedule became active."""
    return [event["step"] + 0.5 for event in run.events if "after" in event]


def _step_table(run: RunFiles) -> Table:
    count = min(len(run.rows), _SHOWN_STEPS)
    shown = np.unique(np.linspace(0, len(run.rows) - 1, count).round().astype(int))
    columns = {head: name for head, name in _STEP_COLUMNS.items() if run.has(name)}
    rows = [
        [str(row["step"]), *(number(row.get(name)) for name in columns.values())]
        for row in (run.rows[index] for index in shown)
    ]
    title = "Steps" if count == len(run.rows) else f"Steps, {count} of {len(run.rows):,}"
    return Table(title, ("step", *columns), rows)


def _event_tables(run: RunFiles) -> list[Table]:
    if not run.events:
        return []
    rows = []
    for event in run.events:
        values = flat({key: value for key, value in event.items() if key != "step"})
        text = ", ".join(f"{name} {value}" for name, value in values.items())
        rows.append((str(event["step"]), text))
    return [Table("Events", ("step", "what happened"), rows, words=2)]


def _excerpts(folder: Path) -> list[Excerpt]:
    """Best and worst response of one group in each of at most four steps.

    Raises `ReportError` if the file is damaged.
    """
    path = folder / RESPONSES_FILE
    rows = json_lines(path)
    steps = sorted({row["step"] for row in rows})
    shown = (
        np.unique(np.linspace(0, len(steps) - 1, _EXCERPT_STEPS).round().astype(int))
        if steps
        else ()
    )
    excerpts = []
    with reading(path, "sparrow train"):
        for step in (steps[index] for index in shown):
            of_step = [row for row in rows if row["step"] == step]
            first = of_step[0]["task"], of_step[0]["prompt_id"]
            group = [row for row in of_step if (row["task"], row["prompt_id"]) == first]
            group.sort(key=lambda row: row["reward"], reverse=True)
            excerpts += [_excerpt(row) for row in ([group[0], group[-1]] if group[1:] else group)]
    return excerpts


def _excerpt(row: dict[str, Any]) -> Excerpt:
    facts = [
        f"Step {row['step']}",
        f"{row['task']}/{row['prompt_id']}",
        f"reward {number(row['reward'])}",
        *(f"{name} {number(value)}" for name, value in row["scores"].items()),
        f"{row['length']:,} tokens",
        row["finish_reason"],
    ]
    if row["tail"] is not None:
        facts.append(f"tail {number(row['tail'])}")
    text = row["text"]
    left_out = len(text) - _HEAD - _END
    if left_out > 0:
        text = f"{text[:_HEAD]}\n[… {left_out:,} characters …]\n{text[-_END:]}"
    return Excerpt(", ".join(facts), text)
