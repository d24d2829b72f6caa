"""`sparrow bench distill`: short training runs with a DistillSparse adapter, merged into the synced
weights and through SGLang's LoRA manager: the tail without, with half and with all of it, and the
speed of rollouts."""

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import run
from typing import Any

from sparrow_sglang.benchmarks.common import add_row, begin, bench_parser
from sparrow_sglang.command_line import count
from sparrow_sglang.run_folder import METRICS_FILE, read_rows

CONFIG = Path(__file__).with_name("distill.toml")
DELIVERIES = ("merged", "lora")

DESCRIPTION = """\
Train a few steps of GRPO with a DistillSparse adapter, once for each delivery of it (distill.toml).
Rows have each step's tail without, with half and with all of the adapter, and the rollouts' speed.
"""
EXAMPLES = "  sparrow bench distill --model-path M --steps 6\n"


def row_of(delivery: str, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A result of the metrics of a run's steps; speeds without the first one, which warms up."""
    speeds = [step["sparrow/rollout_tokens_per_s"] for step in steps[1:]]
    names = ("distill_scale", "distill_p05_scale0", "distill_p05_scale0.5", "distill_p05_scale1")
    return {
        "delivery": delivery,
        "rollout_tokens_per_s": statistics.median(speeds) if speeds else None,
        "rollout_tokens_per_s_all": speeds,
        **{name: [step.get(f"sparrow/{name}") for step in steps] for name in names},
        "step_s": [step["timing_s/step"] for step in steps],
    }


def main(argv: Sequence[str]) -> int:
    parser = bench_parser("distill", DESCRIPTION, EXAMPLES, "distill.json")
    parser.add_argument("--model-path", default="smollm2-135m", help="the dense policy")
    parser.add_argument("--steps", type=count, default=6, help="steps of each run")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    options = parser.parse_args(argv)
    begin(options)
    failed = False
    for delivery in DELIVERIES:
        with tempfile.TemporaryDirectory() as folder:
            fixed = {"run_dir": folder, "steps": options.steps, "model.path": options.model_path}
            settings = [f"{key}={value}" for key, value in fixed.items()]
            settings += [f"distill.delivery={delivery}", *options.settings]
            command = [sys.executable, "-m", "sparrow_sglang.commands.cli", "train", str(CONFIG)]
            command += [word for setting in settings for word in ("--set", setting)]
            failed |= run(command).returncode != 0
            rows = read_rows(Path(folder, METRICS_FILE))
            steps = [row for row in rows if "timing_s/step" in row]
        add_row(options.out, row_of(delivery, steps))
        print(json.dumps(row_of(delivery, steps)), flush=True)
    return int(failed)
