"""Command line options with which benchmarks take seconds."""

ROLLOUT = [
    "--sequences",
    "8",
    "--mean-tokens",
    "40",
    "--max-tokens",
    "120",
    "--prompt-tokens",
    "48",
]
