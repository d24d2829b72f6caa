"""Draws the README's figure, docs/figures/speedup-{light,dark}.svg, from committed results.

.venv/bin/python tools/figures.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
FIGURES = ROOT / "docs" / "figures"
DEVICE, BATCH, TARGET = "H200", 16, "0.86"
# Files of `sparrow bench step` that have a model's sparse and dense steps.
MODELS = {
    "qwen3-1.7b": (
        "decode_step_qwen3-1.7b",
        "decode_step_qwen3-1.7b_fa3",
        "decode_step_qwen3-1.7b_sglang-0.5.23",
    ),
    "qwen3-4b": ("decode_step_qwen3-4b-8b",),
    "qwen3-8b": ("decode_step_qwen3-4b-8b", "decode_step_qwen3-8b"),
    "qwen3-14b": ("decode_step_qwen3-14b", "decode_step_qwen3-14b_int4_pairs"),
}
COLOURS = ("#2a78d6", "#c2571a", "#178a5b", "#8b5bd1")
INK = {"light": ("#1f2328", "#d1d9e0"), "dark": ("#e6edf3", "#3d444d")}


def speedups(model: str) -> dict[int, float]:
    """By context, the fastest dense step of a model over its slowest measured sparse one."""
    files = (json.loads((RESULTS / f"{name}.json").read_text()) for name in MODELS[model])
    rows = [row for file in files for row in file["rows"] if row["model"] == model]
    times: dict[int, tuple[list[float], list[float]]] = {}
    for row in rows:
        batch, _, context = row["case"].partition("x")
        if batch == str(BATCH) and row["schedule"] in (None, f"{model}-{TARGET}"):
            sides = times.setdefault(int(context), ([], []))
            sides[row["schedule"] is not None].append(row["step_ms"])
    return {
        context: min(dense) / max(sparse)
        for context, (dense, sparse) in sorted(times.items())
        if dense and sparse
    }


def draw(theme: str) -> None:
    """Write the figure for pages of a light or a dark background."""
    ink, rule = INK[theme]
    style: dict[str, Any] = {
        # Outlines instead of text, so that no renderer needs the font; equal data, equal file.
        "svg.fonttype": "path",
        "svg.hashsalt": "sparrow",
        "font.size": 12,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        **dict.fromkeys(("axes.edgecolor", "grid.color"), rule),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), ink),
        **dict.fromkeys(("xtick.color", "ytick.color"), ink),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        for model, colour in zip(MODELS, COLOURS, strict=True):
            line = speedups(model)
            axes.plot(list(line), list(line.values()), "o-", color=colour, linewidth=2.4)
            name = model.replace("qwen", "Qwen").replace("b", "B")
            context, last = list(line.items())[-1]
            axes.text(1.03 * context, last, f"{name}  {last:.2f}×", va="center", color=colour)
        axes.axhline(1, color=ink, linewidth=1.2, linestyle="--")
        axes.text(1.03 * context, 1, "fastest dense backend", va="bottom")
        axes.set_xticks([4096 * i for i in (1, 2, 4, 8)], ["4K", "8K", "16K", "32K"])
        axes.set_xlim(0, 1.48 * context)
        axes.set_yticks([1, 2, 3], ["1×", "2×", "3×"])
        axes.set_ylim(0.8, 3.05)
        axes.grid(axis="y")
        axes.set_xlabel("tokens in the KV cache of each sequence", loc="left")
        axes.set_title(f"Speed-up of a decode step, {BATCH} sequences, {DEVICE}")
        figure.savefig(FIGURES / f"speedup-{theme}.svg", metadata={"Date": None})


if __name__ == "__main__":
    for theme in INK:
        draw(theme)
