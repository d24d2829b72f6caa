"""Result files of benchmarks, and the commands that wrote them."""

import re
from dataclasses import dataclass
from typing import Any, Self

from sparrow_sglang.report.page import ReportError

_PACKAGES = {
    "sglang": "SGLang",
    "torch": "torch",
    "triton": "Triton",
    "flashinfer-python": "FlashInfer",
}
_STARTED_AS = {
    "cli.py": "sparrow",
    "decode_step.py": "sparrow bench step",
    "kernels.py": "sparrow bench kernels",
    "rollout_replay.py": "sparrow bench rollout",
    "serving.py": "sparrow bench serving",
    "train_memory.py": "python -m sparrow_sglang.benchmarks.training.train_memory",
    "learning_curves.py": "python -m sparrow_sglang.benchmarks.training.learning_curves",
    "distill_gain.py": "python -m sparrow_sglang.benchmarks.training.distill_gain",
    "distill_settings.py": "python -m sparrow_sglang.benchmarks.training.distill_settings",
    "learned_selection.py": "python -m sparrow_sglang.benchmarks.training.learned_selection",
    "audit_overhead.py": "python -m sparrow_sglang.benchmarks.rollouts.audit_overhead",
    "weight_sync.py": "python -m sparrow_sglang.benchmarks.training.weight_sync",
    "soak.py": "python -m sparrow_sglang.benchmarks.rollouts.soak",
    "rule_comparison.py": "python -m sparrow_sglang.benchmarks.rollouts.rule_comparison",
    "turn_prefill.py": "python -m sparrow_sglang.benchmarks.rollouts.turn_prefill",
    "step_times.py": "python -m sparrow_sglang.benchmarks.training.step_times",
    "verl_runs.py": "python -m sparrow_sglang.benchmarks.training.verl_runs",
    "acceptance_distribution.py": "python -m"
    " sparrow_sglang.benchmarks.rollouts.acceptance_distribution",
    "slime_runs.py": "python -m sparrow_sglang.benchmarks.training.slime_runs",
}


@dataclass(frozen=True)
class Run:
    """One result file: `path` from the root of the checkout, and its content."""

    path: str
    content: dict[str, Any]

    @classmethod
    def checked(cls, path: str, content: dict[str, Any]) -> Self:
        """A checked `Run`; raises `ReportError` without rows or a field that every result has."""
        missing = {"device", "packages", "commit", "command", "rows"} - content.keys()
        rows = content.get("rows")
        if missing or not rows or not all(isinstance(row, dict) for row in rows):
            words = ", ".join(sorted(missing)) or "rows"
            raise ReportError(f"{path}: lacks {words}; expected what `sparrow bench` writes")
        return cls(path, content)

    @property
    def device(self) -> str:
        return str(self.content["device"]).removeprefix("NVIDIA ")

    @property
    def sglang(self) -> str:
        return str(self.content.get("packages", {}).get("sglang", ""))

    @property
    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.content["rows"]
        return rows

    @property
    def source(self) -> str:
        """Device, versions, commit, file and commands."""
        packages = self.content["packages"]
        versions = [f"{name} {packages[key]}" for key, name in _PACKAGES.items() if packages[key]]
        commands = [*self.content.get("earlier_commands", []), self.content["command"]]
        return (
            f"{self.content['device']}, {', '.join(versions)}, commit"
            f" `{self.content['commit']}`, [results]({self.path}):"
            f" {', '.join(f'`{rerun_command(each)}`' for each in commands)}"
        )


def rerun_command(recorded: str) -> str:
    """The recorded command as a user types it: `sparrow bench`, JSON quoted, without --out."""
    program, _, options = recorded.partition(" ")
    options = re.sub(r" ?--out[ =]\S+", "", options)
    options = re.sub(r"(?<!')(\{[^{}']*\"[^{}']*\})(?!')", r"'\1'", options)
    return f"{_STARTED_AS.get(program, program)} {options.strip()}".strip()
