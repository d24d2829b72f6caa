"""`sparrow bench attention`: attention of a sparse step beside FlashInfer's paged decode, over the
same selected pages."""

from collections.abc import Sequence

from sparrow_sglang.benchmarks.common import add_row, begin, bench_parser, require_cuda
from sparrow_sglang.benchmarks.step import model_config
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.schedules.names import load_schedule
from sparrow_sglang.schedules.schedule import DRAFTS, PAGE_SIZE

MODELS, CASES = ("qwen3-8b", "qwen3-1.7b"), ((1, 32768), (16, 32768))

DESCRIPTION = """\
Time the attention of one layer of a sparse decode step, by this package's kernel and by FlashInfer,
over the same pages, and compare the outputs: Qwen3-8B and 1.7B, 1 and 16 sequences of 32K tokens,
the budgets of their schedules for 0.86 and of drafts. FlashInfer is compiled at the first use,
which takes minutes. Its plan depends on lengths, and is timed apart from its run.
"""


def main(argv: Sequence[str]) -> int:
    parser = bench_parser("attention", DESCRIPTION, "  sparrow bench attention", "attention.json")
    options = parser.parse_args(argv)
    require_cuda()
    begin(options)
    from sparrow_sglang.benchmarks.attention_layers import measure

    for model in MODELS:
        shape = ModelShape.from_config(model_config(model))
        for name in (f"{model}-0.86", DRAFTS):
            for batch, length in CASES:
                pages = load_schedule(name, PAGE_SIZE).budget_at(length) // PAGE_SIZE
                row = {"model": model, "schedule": name, "case": f"{batch}x{length}"}
                row |= {"pages": pages} | measure(shape, batch, length, pages)
                add_row(options.out, row)
                print(row, flush=True)
    return 0
