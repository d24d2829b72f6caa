"""A server compiles few kernels at its first start, however many batch sizes it captures.

Triton takes seconds to compile one, and compiles another for each new set of constant arguments.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from sparrow_sglang.attention_backends.kernels import decode, select
from sparrow_sglang.attention_backends.kernels.decode import (
    _SPLIT_PADS,
    MAX_SPLITS,
    DecodeLaunch,
    allocate_decode_scratch,
    decode_launch,
)
from sparrow_sglang.attention_backends.kernels.select import (
    allocate_select_scratch,
    select_launch,
)
from sparrow_sglang.attention_backends.landmarks import MeanLandmarks

# The batch sizes that SGLang captures, up to 256.
BATCHES = [1, 2, 4, 8, 12, *range(16, 257, 8)]
DIM, PAGES = 128, 2048
CPU = torch.device("cpu")


class Launches:
    """Stands in for a kernel and keeps the constants of each launch."""

    def __init__(self) -> None:
        self.constants: set[tuple[tuple[str, Any], ...]] = set()

    def __getitem__(self, grid: tuple[int, int]) -> "Launches":
        return self

    def __call__(self, *_: Any, **constants: Any) -> None:
        self.constants.add(tuple(sorted(constants.items())))


@pytest.fixture(params=[4, 8], ids="{} KV heads".format)
def kv_heads(request: pytest.FixtureRequest) -> int:
    heads: int = request.param
    return heads


def test_attention(monkeypatch: pytest.MonkeyPatch, kv_heads: int) -> None:
    launches = Launches()
    monkeypatch.setattr(decode, "_decode_kernel", launches)
    pool = torch.zeros(16, kv_heads, DIM, dtype=torch.bfloat16)
    for batch in BATCHES:
        q = torch.zeros(batch, 2 * kv_heads, DIM, dtype=torch.bfloat16)
        launch = decode_launch(batch, kv_heads, DIM, 16 * PAGES, CPU, 2)
        parts = allocate_decode_scratch(len(q) * 2 * kv_heads * MAX_SPLITS, 2048, DIM, CPU)
        page_ids = torch.zeros(batch, kv_heads, 1, dtype=torch.int32)
        counts = torch.ones(batch, dtype=torch.int32)
        common = {"page_size": 16, "sm_scale": 1.0, "scratch": parts, "launch": launch}
        decode.sparse_decode(q, pool, pool, page_ids, counts, counts, q, **common)
    assert len(launches.constants) <= 3


def assert_no_spills(
    folder: Path, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int
) -> None:
    """`types` of the arguments that are not int32; the kernel is compiled for an H100."""
    types = types | dict.fromkeys(constants, "constexpr")
    names = [each.name for each in kernel.params]
    aligned = [
        index
        for index, name in enumerate(names)
        if types.get(name, "").startswith("*") or name.endswith("_stride")
    ]
    source = triton.compiler.ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "-res-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    assert " REG:" in usage and " STACK:0 " in usage, usage


@pytest.mark.parametrize(
    ("splits", "rows"), [*((splits, 1) for splits in _SPLIT_PADS), (64, 2), (64, 4)]
)
def test_attention_spills_no_registers(tmp_path: Path, splits: int, rows: int) -> None:
    """A program is one warp, whose registers must hold a tile, and then the parts it merges."""
    launch = DecodeLaunch(splits)
    constants = {
        "sinks": None, "HEADS": 8, "GROUP": 4, "D": DIM, "PAGE": 16, "SPLITS_PAD": splits,
        "MMA_ROWS": 16, "BLOCK": launch.block_tokens, "STAGES": launch.stages,
        "EVERY_PAGE": False, "HAS_ATTN_SINKS": False, "AFTER_SELECT": False, "ROWS": rows,
    }  # fmt: skip
    types = dict.fromkeys(("q", "k_buffer", "v_buffer", "out"), "*bf16")
    types |= dict.fromkeys(("page_ids", "num_selected", "seq_lens", "arrivals"), "*i32")
    types |= dict.fromkeys(("partial_out", "partial_lse"), "*fp32")
    types |= dict.fromkeys(("scale", "v_scale"), "fp32")
    options = {"num_warps": launch.num_warps, "num_stages": launch.stages}
    assert_no_spills(tmp_path, decode._decode_kernel, types, constants, **options)


@pytest.mark.parametrize("rows", [1, 4])
def test_selection_spills_no_registers(tmp_path: Path, rows: int) -> None:
    """The keys of all rows of a request stay in registers while thresholds are searched."""
    launch = select_launch(1, 8, DIM, PAGES, CPU, int4_landmarks=4)
    constants = {
        "HEADS": 8, "GROUP": 4, "D": DIM, "PAGE": 16, "SINK_PAGES": 1, "RECENT_PAGES": 2,
        "UPDATE_LANDMARK": True, "LANDMARKS": 4, "PAIRS": 32, "BEST_HEAD": True, "GROUP_PAD": 4,
        "MMA_COLUMNS": 16, "BLOCK": launch.block_pages, "STAGES": launch.stages,
        "RADIX": launch.radix, "SHORT_ROW": 512, "CHUNK": 2048, "DEPENDENTS": False, "ROWS": rows,
    }  # fmt: skip
    types = dict.fromkeys(("q", "k_buffer"), "*bf16")
    types |= {"landmarks": "*u8", "scales": "*fp16", "pairs": "*i64"}
    pointers = ("page_table", "seq_lens", "num_selected", "page_ids", "union_counts", "keys")
    types |= dict.fromkeys((*pointers, "arrivals"), "*i32")
    kernel = select._select_kernel
    assert_no_spills(tmp_path, kernel, types, constants, num_warps=launch.num_warps)


def test_selection(monkeypatch: pytest.MonkeyPatch, kv_heads: int) -> None:
    launches = Launches()
    monkeypatch.setattr(select, "_select_kernel", launches)
    pool = torch.zeros(16, kv_heads, DIM, dtype=torch.bfloat16)
    scratch = allocate_select_scratch(max(BATCHES), kv_heads, PAGES, CPU)
    for batch in BATCHES:
        select.select_pages(
            torch.zeros(batch, 2 * kv_heads, DIM, dtype=torch.bfloat16),
            pool,
            MeanLandmarks(pool[:1, :, None]),
            torch.zeros(batch, PAGES, dtype=torch.int32),
            torch.ones(batch, dtype=torch.int32),
            torch.ones(batch, dtype=torch.int32),
            torch.zeros(batch, kv_heads, 8, dtype=torch.int32),
            page_size=16,
            sink_pages=1,
            recent_pages=2,
            scratch=scratch,
            launch=select_launch(batch, kv_heads, DIM, PAGES, CPU),
        )
    assert len(launches.constants) <= 2


@pytest.mark.parametrize("kernel", [decode._decode_kernel, select._select_kernel])
def test_what_differs_by_batch_size_is_no_constant(kernel: Any) -> None:
    """If it were specialized, Triton would compile another kernel for 1 and for multiples of 16."""
    assert [each.name for each in kernel.params if each.do_not_specialize] == ["splits"]
