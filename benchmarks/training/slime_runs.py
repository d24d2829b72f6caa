"""slime's own loop on sparse servers: its rollouts, their tail, and its dense evaluation.

`python -m sparrow_sglang.benchmarks.training.slime_runs` runs it. It needs a checkout of slime, and
an environment with the packages that slime's rollout side imports.

In: a checkout, a schedule and sizes. The benchmark runs examples/slime/rollouts.py, which is
slime's `train.py` with another trainer than Megatron, on servers that share one GPU. Out: what
slime has sampled in each rollout and in the evaluation, as JSON, with device, versions and commits,
slime's among them.
"""

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparrow_sglang.benchmarks.options import benchmark_parser, prepare_out, settings
from sparrow_sglang.benchmarks.processes import (
    START_S,
    ProcessFailed,
    Server,
    free_port,
    log_end,
    logged_process,
    server_flags,
    until_healthy,
    with_modules,
)
from sparrow_sglang.benchmarks.result_files import Results
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.client.scoring import score_dense
from sparrow_sglang.command_line import count
from sparrow_sglang.models import EMBEDDED_MODEL_NAME, model_folder
from sparrow_sglang.provenance import commit_of
from sparrow_sglang.rl.acceptance import acceptance_metrics

DESCRIPTION = """\
Run slime's loop on sparse servers of one GPU, with a task of its own and slime's evaluation dense.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.training.slime_runs examples/slime --slime ~/slime
"""
BIN_TOKENS = 512

Sample = Mapping[str, Any]


@contextmanager
def sparse_servers(options: Namespace, model: str) -> Iterator[list[str]]:
    """URLs of servers that record for exact acceptance rates; all on the first visible GPU."""
    recording = {"SPARROW_RECORD": f"{options.slots}x{options.tokens}"}
    on_gpu = torch.cuda.is_available()
    with ExitStack() as processes:
        servers = []
        for index in range(options.servers):
            port = free_port()
            command = [sys.executable, "-m", "sparrow_sglang.commands.cli", "serve"]
            command += ["--sparrow-schedule", options.schedule]
            command += server_flags(Path(model), port, random_weights=False, on_gpu=on_gpu)
            command += ["--max-total-tokens", str(options.pool), "--grammar-backend", "none"]
            command += ["--max-running-requests", str(options.running)]
            if on_gpu:
                # A fraction is no limit if others use the GPU, too; --max-total-tokens sets it.
                command += ["--mem-fraction-static", "0.9", "--disable-prefill-cuda-graph"]
            log = options.work / f"server{index}.txt"
            process = processes.enter_context(logged_process(command, log, os.environ | recording))
            servers.append(Server(process, f"http://127.0.0.1:{port}", log))
        for _ in until_healthy(servers, START_S):
            pass
        yield [server.url for server in servers]


def slime_command(options: Namespace, model: str, urls: Sequence[str]) -> list[str]:
    """The command line of slime's loop."""
    prompts, work = options.work / "prompts.jsonl", options.work
    config = json.loads(Path(model, "config.json").read_text())
    rope_base = config.get("rope_parameters", config)["rope_theta"]
    command = [sys.executable, str(options.recipe / "rollouts.py"), "--hf-checkpoint", model]
    command += ["--rotary-base", str(rope_base)]
    command += ["--rollout-external-engine-addrs", *(url.removeprefix("http://") for url in urls)]
    command += ["--actor-num-gpus-per-node", "1", "--update-weight-mode", "full"]
    command += ["--update-weight-transport", "disk"]
    command += ["--update-weight-disk-dir", str(work / "weights")]
    command += ["--prompt-data", str(prompts), "--input-key", "prompt", "--label-key", "label"]
    command += ["--apply-chat-template", "--custom-rm-path", "task.reward"]
    command += ["--rollout-batch-size", str(options.prompts)]
    command += ["--n-samples-per-prompt", str(options.samples), "--num-steps-per-rollout", "1"]
    command += ["--rollout-max-response-len", str(options.tokens)]
    command += ["--num-rollout", str(options.rollouts), "--lr", str(options.lr)]
    command += ["--loss-type", "policy_loss", "--use-tis", "--tis-clip", "2.0"]
    command += ["--custom-generate-function-path", "recorded_rollouts.generate"]
    command += ["--custom-config-path", str(work / "sparrow.yaml")]
    # Evaluate after the last rollout, so that the servers still hold the evaluated weights.
    command += ["--eval-interval", str(options.rollouts), "--skip-eval-before-train"]
    command += ["--eval-prompt-data", "words", f"{prompts}@[0:{options.prompts}]"]
    command += ["--eval-max-response-len", str(options.tokens)]
    return [*command, "--dump-details", str(work / "details")]


def samples_of(options: Namespace, name: object) -> list[dict[str, Any]]:
    """Samples that slime has dumped of a rollout or an evaluation."""
    path = options.work / f"details/rollout_data/{name}.pt"
    samples: list[dict[str, Any]] = torch.load(path, weights_only=False)["samples"]
    return samples


def row_of(name: object, samples: Sequence[Sample]) -> dict[str, Any]:
    """Lengths, rewards and speed of all samples, and the tail of the recorded ones."""
    lengths = [sample["response_length"] for sample in samples]
    rewards = [float(sample["reward"]) for sample in samples]
    seconds = _seconds(samples)
    row = {
        "rollout": str(name),
        "responses": len(samples),
        "tokens": sum(lengths),
        "length_mean": float(np.mean(lengths)),
        "reward_mean": float(np.mean(rewards)),
        "seconds": seconds,
        "tokens_per_s": sum(lengths) / seconds,
        "lengths": lengths,
        "rewards": rewards,
        "weight_versions": sorted(
            {name for sample in samples for name in sample["weight_versions"]}
        ),
    }
    rates: list[float] = []
    positions: list[int] = []
    recorded = 0
    for sample in samples:
        if found := (sample["metadata"] or {}).get("sparrow_acceptance"):
            recorded += 1
            rates += found
            start = len(sample["tokens"]) - sample["response_length"] + 1
            positions += range(start, start + len(found))
    measured = ~np.isnan(rates)
    if measured.any():
        tail = acceptance_metrics(
            np.array(rates)[measured], np.array(positions)[measured] // BIN_TOKENS
        )
        row |= {key.removeprefix("sparrow/"): value for key, value in tail.items()}
        row |= {"recorded": recorded, "accept_tokens": int(measured.sum())}
    return row


def _seconds(samples: Sequence[Sample]) -> float:
    """Seconds from the first request to the last answer in slime's traces."""
    times = [
        event["ts"]
        for sample in samples
        for event in sample["trace"]["events"]
        if event["name"] == "sglang_generate"
    ]
    return max(times) - min(times)


def density(url: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Mean distance of log-probs from dense ones of the same weights: for slime's evaluation, and
    for sparse responses to the same prompts, which are requested here without slime.
    """
    endpoint = connect(url)
    cuts = [len(sample["tokens"]) - sample["response_length"] for sample in samples]
    prompts = [sample["tokens"][:cut] for sample, cut in zip(samples, cuts, strict=True)]
    evaluated = [
        (sample["tokens"][cut:], sample["rollout_log_probs"])
        for sample, cut in zip(samples, cuts, strict=True)
    ]
    requests = [
        {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": len(tokens), "ignore_eos": True},
            "return_logprob": True,
        }
        for prompt, (tokens, _) in zip(prompts, evaluated, strict=True)
    ]
    entries = [
        answer["meta_info"]["output_token_logprobs"] for answer in endpoint.generate(requests)
    ]
    sparse = [([entry[1] for entry in row], [entry[0] for entry in row]) for row in entries]
    return {
        "evaluation_dense_logprob_abs_diff": _difference(url, prompts, evaluated),
        "sparse_dense_logprob_abs_diff": _difference(url, prompts, sparse),
    }


def _difference(
    url: str,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> float:
    pairs = [(prompt, tokens) for prompt, (tokens, _) in zip(prompts, responses, strict=True)]
    dense = np.concatenate([scores.logprobs for scores in score_dense(url, pairs)])
    return float(np.abs(dense - np.concatenate([logprobs for _, logprobs in responses])).mean())


def run(options: Namespace, model: str, results: Results) -> None:
    """Start servers, run slime and write its rollouts, also if it fails or this process is ended.

    Raises `ProcessFailed`.
    """
    options.work.mkdir(parents=True, exist_ok=True)
    # Otherwise dumps of an earlier start would be taken for this one's.
    shutil.rmtree(options.work / "details", ignore_errors=True)
    sampling = {"sparrow_slots": options.slots, "sparrow_sampling": {"ignore_eos": True}}
    # JSON is YAML.
    (options.work / "sparrow.yaml").write_text(json.dumps(sampling))
    prompts = [sys.executable, str(options.recipe / "task.py")]
    subprocess.run([*prompts, str(options.work / "prompts.jsonl")], check=True)
    log = options.work / "slime.txt"
    with sparse_servers(options, model) as urls:
        command = slime_command(options, model, urls)
        ours = with_modules(options.recipe, options.slime) | {"RAY_USAGE_STATS_ENABLED": "0"}
        try:
            with logged_process(command, log, ours) as process:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(options.limit)
                said = log_end(log)
        finally:
            for rollout in range(options.rollouts):
                if (options.work / f"details/rollout_data/{rollout}.pt").exists():
                    results.add(row_of(rollout, samples_of(options, rollout)))
        if process.returncode:
            raise ProcessFailed(f"slime ended with status {process.returncode}:\n{said}")
        name = f"eval_{options.rollouts - 1}"
        evaluated = samples_of(options, name)
        results.add(row_of(name, evaluated) | density(urls[0], evaluated))


def main(argv: Sequence[str] | None = None) -> int:
    """Run and write; the exit code is 1 if a server or slime has failed or was ended."""
    parser = benchmark_parser("training.slime_runs", DESCRIPTION, EXAMPLES, "slime_runs.json")
    add = parser.add_argument
    add("recipe", type=Path, help="examples/slime")
    add("--slime", type=Path, required=True, help="folder with slime's train.py")
    add("--slime-commit", help="of that folder, where it is not a git clone")
    add("--model", default=EMBEDDED_MODEL_NAME, help="folder (default: %(default)s)")
    add("--schedule", default="smollm2-135m-0.86", help="(default: %(default)s)")
    add("--servers", type=count, default=2, help="(default: %(default)s)")
    add("--rollouts", type=count, default=4, help="(default: %(default)s)")
    add("--prompts", type=count, default=8, help="of a rollout (default: %(default)s)")
    add("--samples", type=count, default=8, help="of a prompt (default: %(default)s)")
    add("--tokens", type=count, default=2048, help="of a response (default: %(default)s)")
    add("--slots", type=count, default=4, help="that a server records at a time")
    add("--running", type=count, default=64, help="requests of a server at a time")
    add("--pool", type=count, default=160_000, help="tokens of KV of a server")
    add("--lr", type=float, default=1e-5)
    add("--limit", type=count, default=3600, help="seconds for slime (default: %(default)s)")
    add("--work", type=Path, default=Path("runs/slime"))
    options = parser.parse_args(argv)
    if not (options.slime / "train.py").is_file():
        parser.error(f"--slime {options.slime}: expected a checkout of slime, with train.py")
    if (commit := commit_of(options.slime / "train.py") or options.slime_commit) is None:
        parser.error(
            f"--slime {options.slime}: is not a git clone; expected one, or --slime-commit, as the"
            " result records slime's commit"
        )
    prepare_out(parser, options.out)
    for name in ("recipe", "slime", "work"):
        setattr(options, name, getattr(options, name).resolve())
    packages = {name: version(name) for name in ("sglang", "sglang-router", "ray")}
    frameworks = packages | {"slime": commit}
    results = Results(options.out, settings=settings(options), frameworks=frameworks)
    try:
        run(options, model_folder(options.model), results)
    except ProcessFailed as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    finally:
        results.save()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
