"""Section of a training run: reward, length, tail, speed and where the time went, by step.

In: the folder of a run, as `sparrow train` writes it. Out: a `Section`.
"""

from pathlib import Path

import numpy as np

from sparrow_sglang.mismatch.collapse import ALARM, ENTROPY, FALL, WINDOW
from sparrow_sglang.mismatch.tail import BIN_TOKENS
from sparrow_sglang.report.charts import PALETTE, Chart, Line, ramp
from sparrow_sglang.report.page import Figure, Section, Settings, Table, flat, number, provenance
from sparrow_sglang.report.run_files import RunFiles, read_run

_TAIL_OF_BIN = "sparrow/accept_p05_bin"
_SHOWN_STEPS = 40
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


def training_section(folder: Path) -> Section:
    """The run in `folder`. Raises `ReportError` if there is no step yet, or a file is damaged."""
    run = read_run(folder)
    figures = [_reward(run), _length(run), _entropy(run), _tail(run), _tail_by_bin(run)]
    figures += [_time(run), _speed(run), _kv(run), _distance(run)]
    return Section(
        kind="training",
        title=f"Training run {folder.resolve().name}",
        facts=_facts(run),
        figures=[figure for figure in figures if figure is not None],
        tables=[_step_table(run), *_event_tables(run)],
        settings=_settings(run),
    )


def _settings(run: RunFiles) -> list[Settings]:
    """The newest configuration, and the versions, again wherever a resumed run changed them."""
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


def _reward(run: RunFiles) -> Figure:
    lines = [run.line("critic/score/mean", "training", PALETTE[0])]
    if run.has("eval/pass_rate"):
        lines.append(run.line("eval/pass_rate", "held out, dense", PALETTE[1]))
    chart = Chart("Reward", "step", "mean reward", lines, moments=_moves(run))
    return Figure(chart, "Dotted uprights: another schedule." if _moves(run) else "")


def _length(run: RunFiles) -> Figure:
    lines = [
        run.line("response_length/mean", "mean", PALETTE[0]),
        run.line("response_length/max", "longest", PALETTE[1]),
    ]
    limit = run.config.get("rollout", {}).get("max_new_tokens")
    targets = [(f"limit {limit:,}", limit)] if limit else []
    return Figure(
        Chart("Response length", "step", "tokens", lines, targets, _moves(run), from_zero=True)
    )


def _entropy(run: RunFiles) -> Figure | None:
    if not run.has(ENTROPY):
        return None
    line = run.line(ENTROPY, "dense policy", PALETTE[0])
    chart = Chart("Entropy", "step", "nats per token", [line], (), _moves(run), from_zero=True)
    return Figure(
        chart,
        f"An alarm where its mean over {WINDOW} steps is below {FALL:g} of that of the first"
        f" {WINDOW} while the tail is above theirs.",
    )


def _tail(run: RunFiles) -> Figure | None:
    if not run.has("sparrow/accept_p05"):
        return None
    lines = [
        run.line("sparrow/accept_p05", "5th percentile", PALETTE[0]),
        run.line("sparrow/accept_mean", "mean", PALETTE[2]),
    ]
    chart = Chart(
        "Acceptance rate of the rollouts",
        "step",
        "acceptance rate",
        lines,
        _tail_target(run),
        _moves(run),
    )
    return Figure(chart, "Exact, from both whole distributions of measured tokens.")


def _tail_by_bin(run: RunFiles) -> Figure | None:
    found = {name for row in run.rows for name in row if name.startswith(_TAIL_OF_BIN)}
    bins = sorted(int(name.removeprefix(_TAIL_OF_BIN)) for name in found)
    if not bins:
        return None
    lines = [
        run.line(f"{_TAIL_OF_BIN}{index}", f"{index * BIN_TOKENS:,}+", colour)
        for index, colour in zip(bins, ramp(len(bins)), strict=True)
    ]
    chart = Chart(
        "Tail by position", "step", "5th percentile", lines, _tail_target(run), _moves(run)
    )
    return Figure(chart, f"Bins of {BIN_TOKENS:,} positions, named by their first one.")


def _time(run: RunFiles) -> Figure:
    """Stages in the order in which a step goes through them; the rest is what no stage timed."""
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
        # An area needs a width.
        lines = [Line(ln.label, [places[0] - 0.5, places[0] + 0.5], [*ln.y] * 2, ln.colour)
                 for ln in lines]  # fmt: skip
    return Figure(
        Chart(
            "Where the time of a step goes",
            "step",
            "seconds",
            lines,
            (),
            _moves(run),
            stacked=True,
            from_zero=True,
        )  # fmt: skip
    )


def _speed(run: RunFiles) -> Figure:
    line = run.line("sparrow/rollout_tokens_per_s", "rollout", PALETTE[0])
    chart = Chart("Rollout throughput", "step", "tokens/s", [line], (), _moves(run), from_zero=True)
    return Figure(chart, "Response tokens over the seconds of the rollout.")


def _kv(run: RunFiles) -> Figure | None:
    if not run.has("sparrow/kv_tokens_cached"):
        return None
    lines = [
        run.line("sparrow/kv_tokens_cached", "cached", PALETTE[7]),
        run.line("sparrow/kv_tokens_read", "read", PALETTE[0]),
    ]
    chart = Chart(
        "KV tokens per generated token", "step", "tokens", lines, (), _moves(run), from_zero=True
    )
    return Figure(chart, "What a sparse layer reads of the cached tokens, mean over steps.")


def _distance(run: RunFiles) -> Figure | None:
    if not run.has("rollout_corr/k3_kl"):
        return None
    lines = [run.line("rollout_corr/k3_kl", "KL", PALETTE[0])]
    if run.has("sparrow/distill_kl"):
        lines.append(run.line("sparrow/distill_kl", "KL that DistillSparse lowers", PALETTE[3]))
    chart = Chart("Rollout against dense policy", "step", "nats per token", lines, (), _moves(run))
    return Figure(chart, "KL(rollout ‖ dense), estimated from sampled tokens (rollout_corr/k3_kl).")


def _tail_target(run: RunFiles) -> list[tuple[str, float]]:
    target = run.config.get("ladder", {}).get("target")
    return [(f"target {target:g}", target)] if target else []


def _moves(run: RunFiles) -> list[float]:
    """Steps after which another schedule came into force."""
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
