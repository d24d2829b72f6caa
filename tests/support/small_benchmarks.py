"""Command line options with which benchmarks take seconds."""

REQUESTS, INPUT, OUTPUT = 3, 40, 60
SERVING = ["--num-prompts", str(REQUESTS), "--input-len", str(INPUT), "--output-len", str(OUTPUT)]
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
