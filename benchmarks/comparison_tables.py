"""Tables of replayed rollouts, servers, training steps and audits, each with its list of runs."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparrow_sglang.benchmarks.result_files import Run, cited_table, number, times
from sparrow_sglang.rl.renamed import current_names

_CURVES = ("sparrow/accept_p05", "sparrow/kv_tokens_read", "sparrow/kv_tokens_cached")

_ROLLOUT_TEXT = """\
A replayed rollout (`sparrow bench rollout`): all sequences start together in stock SGLang and
generate until the last one is done. Generated tokens over wall time, prefill included; weights are
random unless the command names a model."""
_SERVING_TEXT = """\
SGLang's own `bench_serving` against a server of each kind (`sparrow bench serving`). TTFT, TPOT:
median time to the first token and per further token."""
_TRAINING_TEXT = """\
One training step of the dense policy on one long sequence: peak memory of forward, backward and
optimizer, and the faster of the timed steps; then the same of a step of a DistillSparse adapter,
its target included."""
_LEARNING_TEXT = """\
GRPO from dense and from sparse rollouts, from the same start: held-out pass rate before training
and at the last evaluation that all runs reached (mean and standard deviation over seeds, dense
decode), tail of the acceptance rate and KV tokens read of those held while rolling out, and where
the seconds of a step went. All runs shared one GPU, so that a step alone takes less."""
_AUDIT_TEXT = """\
What `--sparrow-audit-rate` costs a server: output tokens/s of the same load without and with it,
means over the rounds, and the share lost, mean over the pairs of rounds."""


def rollout_table(runs: Sequence[Run]) -> str:
    heads = "model|schedule|sequences|mean tokens|longest|dense s|sparse s|dense tokens/s"
    heads += "|sparse tokens/s|speed-up|device|run"
    return cited_table(_ROLLOUT_TEXT, heads, 2, runs, _rollout_lines)


def serving_table(runs: Sequence[Run]) -> str:
    heads = "model|schedule|requests|prompt|new tokens|TTFT ms dense, sparse"
    heads += "|TPOT ms dense, sparse|dense tokens/s|sparse tokens/s|speed-up|device|run"
    return cited_table(_SERVING_TEXT, heads, 2, runs, _serving_lines)


def training_table(runs: Sequence[Run]) -> str:
    heads = "model|weights|tokens|weights GiB|step peak GiB|step s|scoring s"
    heads += "|adapter peak GiB|adapter step s|device|run"
    return cited_table(_TRAINING_TEXT, heads, 2, runs, _training_lines)


def learning_table(runs: Sequence[Run]) -> str:
    heads = "schedule|seeds|step|pass rate before|pass rate then|tail|KV read of cached"
    heads += "|step s|rollout|log-probs|mismatch|update|sync|device|run"
    return cited_table(_LEARNING_TEXT, heads, 1, runs, _learning_lines)


def audit_table(runs: Sequence[Run]) -> str:
    heads = "model|schedule|audited|requests × new tokens|tokens/s without|tokens/s with|lost"
    return cited_table(_AUDIT_TEXT, heads + "|device|run", 2, runs, _audit_lines)


def _sides(run: Run) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Each sparse row of a run with the dense row, if that was measured."""
    dense = next((row for row in run.rows if not row["schedule"]), None)
    return ((row, dense) for row in run.rows if row["schedule"])


def _rollout_lines(run: Run) -> Iterator[list[str]]:
    for sparse, dense in _sides(run):
        yield [
            sparse["model"],
            sparse["schedule"],
            str(sparse["sequences"]),
            number(sparse["output_tokens"] / sparse["sequences"], 0),
            number(sparse["longest"], 0),
            *_pair(dense, sparse, "seconds", 1),
            *_pair(dense, sparse, "tokens_per_s", 0),
            times(sparse["tokens_per_s"] / dense["tokens_per_s"] if dense else None),
        ]


def _serving_lines(run: Run) -> Iterator[list[str]]:
    for row, dense_row in _sides(run):
        sparse = row["bench_serving"]
        dense = dense_row["bench_serving"] if dense_row else None
        key = "output_throughput"
        yield [
            row["model"],
            row["schedule"],
            str(sparse["completed"]),
            *(number(sparse[f"random_{part}_len"], 0) for part in ("input", "output")),
            ", ".join(_pair(dense, sparse, "median_ttft_ms", 0)),
            ", ".join(_pair(dense, sparse, "median_tpot_ms", 2)),
            *_pair(dense, sparse, key, 0),
            times(sparse[key] / dense[key] if dense else None),
        ]


def _pair(dense: dict[str, Any] | None, sparse: dict[str, Any], key: str, digits: int) -> list[str]:
    return [number(dense[key], digits) if dense else "–", number(sparse[key], digits)]


def _training_lines(run: Run) -> Iterator[list[str]]:
    for row in run.rows:
        yield [
            run.content["model"],
            row["dtype"],
            number(row["tokens"], 0),
            number(row["weights_gib"], 1),
            number(row["step_peak_gib"], 1),
            number(min(row["step_s"]), 2),
            number(row["score_s"], 2),
            number(row["adapter_peak_gib"], 1),
            number(min(row["adapter_step_s"]), 2),
        ]


def _learning_lines(run: Run) -> Iterator[list[str]]:
    rates = [dict(row["curves"]["eval/pass_rate"]) for row in run.rows]
    last = max(set.intersection(*(set(rate) for rate in rates)))
    for schedule in dict.fromkeys(row["schedule"] for row in run.rows):
        own = [row for row in run.rows if row["schedule"] == schedule]
        passed = [dict(row["curves"]["eval/pass_rate"]) for row in own]

        def mean(metric: str, own: list[dict[str, Any]] = own) -> float | None:
            values = [value for row in own for _, value in current_names(row["curves"])[metric]]
            return statistics.mean(values) if values else None

        tail, read, cached = map(mean, _CURVES)
        seconds = [
            statistics.mean(row["seconds_per_step"][f"timing_s/{stage}"] for row in own)
            for stage in ("step", "rollout", "logprobs", "mismatch", "update", "sync")
        ]
        yield [
            Path(schedule).name.removesuffix(".json"),
            str(len(own)),
            str(last),
            *(_spread([rate[step] for rate in passed]) for step in (0, last)),
            "–" if tail is None else f"{tail:.3f}",
            "–" if read is None or cached is None else f"{read:.0f} of {cached:.0f}",
            *(number(value, 1) for value in seconds),
        ]


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def _audit_lines(run: Run) -> Iterator[list[str]]:
    settings = run.content["settings"]
    speed = [
        statistics.mean(row["tokens_per_s"] for row in run.rows if bool(row["rate"]) is audited)
        for audited in (False, True)
    ]
    yield [
        settings["model"],
        settings["schedule"],
        f"{settings['rate']:.1%}",
        f"{settings['requests']} × {settings['new_tokens']}",
        *(number(each, 0) for each in speed),
        f"{statistics.mean(run.content['lost']):.2%}",
    ]
