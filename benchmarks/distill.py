"""`sparrow bench distill`: short training runs with a DistillSparse adapter, merged into the synced
weights and through SGLang's LoRA manager: the tail without, with half and with all of it, and the
speed of rollouts."""

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from subprocess import run
from typing import Any

from sparrow_sglang.benchmarks.common import add_row, begin, bench_parser, require_cuda
from sparrow_sglang.run_folder import METRICS_FILE, read_rows

CONFIG = Path(__file__).with_name("distill.toml")

DESCRIPTION = """\
Train a few steps of GRPO with a DistillSparse adapter, once for each delivery of it (distill.toml).
Rows have each step's tail without, with half and with all of the adapter, and the rollouts' speed.
"""


def row_of(delivery: str, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A result of the metrics of a run's steps; the speed is that of rollouts with the adapter,
    whose scale the step before has chosen. The first step warms up."""
    speed = "sparrow/rollout_tokens_per_s"
    used = [step[speed] for last, step in pairwise(steps) if last.get("sparrow/distill_scale")]
    names = ("distill_scale", "distill_p05_scale0", "distill_p05_scale0.5", "distill_p05_scale1")
    return {
        "delivery": delivery,
        "rollout_tokens_per_s": statistics.median(used) if used else None,
        "rollout_tokens_per_s_all": [step[speed] for step in steps[1:]],
        **{name: [step.get(f"sparrow/{name}") for step in steps] for name in names},
        "step_s": [step["timing_s/step"] for step in steps],
    }


def main(argv: Sequence[str]) -> int:
    parser = bench_parser("distill", DESCRIPTION, "  sparrow bench distill", "distill.json")
    parser.add_argument("--model-path", default="smollm2-135m", help="the dense policy")
    options = parser.parse_args(argv)
    require_cuda()
    begin(options)
    failed = False
    for delivery in ("merged", "lora"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "sparrow_sglang.commands.cli", "train", str(CONFIG)]
            for setting in (f"run_dir={folder}", f"model.path={options.model_path}"):
                command += ["--set", setting]
            if run([*command, "--set", f"distill.delivery={delivery}"]).returncode != 0:
                print(f"{delivery}: failed, left out", file=sys.stderr, flush=True)
                failed = True
                continue
            rows = read_rows(Path(folder, METRICS_FILE))
            add_row(options.out, row_of(delivery, [row for row in rows if "timing_s/step" in row]))
    return int(failed)
