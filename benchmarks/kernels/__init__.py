"""`sparrow bench kernels`: times and errors of one layer's kernels, and of other libraries."""

from collections.abc import Sequence

from sparrow_sglang.benchmarks.common import bench_parser, require_cuda
from sparrow_sglang.command_line import OneLineParser
from sparrow_sglang.errors import InputError
from sparrow_sglang.schedule import PAGE_SIZE
from sparrow_sglang.schedule_names import load_schedule

DESCRIPTION = """\
Time the GPU kernels of one layer of a sparse decode step, each after a check against the plain
torch definition, and kernels of other libraries for the same work. The floor is the time to move
the bytes that a kernel needs, at the copy bandwidth measured at the start.
"""
EXAMPLES = """\
  sparrow bench kernels --quick                            main shapes only, without other libraries
  sparrow bench kernels --out kernels.json                 everything
  sparrow bench kernels --schedule qwen3-1.7b-0.86         a schedule's selection rule and budgets
  sparrow bench kernels --quick --kv-cache-dtype fp8_e4m3  over an FP8 KV cache
"""
# KV pools and landmarks of 2**20 tokens take 7 GB, the buffers of the bandwidth test 9 GB.
_MEMORY_GB = 24


def _parser() -> OneLineParser:
    parser = bench_parser("kernels", DESCRIPTION, EXAMPLES, "kernels.json")
    parser.add_argument(
        "--quick", action="store_true", help="main shapes only, without other libraries"
    )
    parser.add_argument(
        "--schedule",
        metavar="SCHEDULE",
        help="time selection by the rule of this schedule (shipped name or .json file) and"
        " attention under its budgets, instead of the published rule's cases",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8_e4m3"),
        default="auto",
        help="dtype of the KV cache; auto is bf16; with fp8_e4m3 other libraries are left out",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code is 1 if one of our kernels failed, 2 without a GPU."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        schedule = load_schedule(args.schedule, PAGE_SIZE) if args.schedule else None
    except InputError as error:
        parser.error(str(error))
    require_cuda(parser, _MEMORY_GB, "the KV pools of the cases")
    # Imported here because wrong options are to be answered at once.
    from sparrow_sglang.benchmarks.kernels.kernel_times import run

    return run(parser, args, schedule)
