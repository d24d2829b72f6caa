"""Attention of one KV head over a range of paged tokens, as device functions for `decode`.

In: the queries of a group, the KV pool, page ids. Out: the queries' outputs and log-sum-exps.
"""

import triton
import triton.language as tl

from sparrow_sglang.attention_backends.kernels.common import (
    head_columns,
    head_mask,
)

# The interpreter has no inline assembly.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _as_operand(values: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """`values` in DTYPE; FP8 ones become fp16 before they take the layout of the tensor cores.

    A register of that layout holds numbers of neighbouring tokens, which lie in different rows of
    shared memory. FP8 numbers would be gathered byte by byte; for 16-bit numbers the load itself
    transposes.
    """
    if values.dtype != tl.float8e4nv or INTERPRETED:
        return values.to(DTYPE)
    else:
        # Declared impure, or the compiler would move the layout conversion before it.
        return tl.inline_asm_elementwise(
            "{.reg .b16 low, high; mov.b32 {low, high}, $2;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;}",
            "=r,=r,r",
            [values],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )


@triton.jit
def attend(
    queries: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    pages: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    sink: tl.tensor,
    ROW: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Output in the shape of `queries`, and base-2 log-sum-exp, over the tokens [first, end).

    `scale` is a factor of the logits, of all rows or one of each as a column. `sink` holds one more
    logit of each row, base 2, whose value is 0; -inf for none.
    """
    columns = head_columns(D)
    largest = sink
    total = tl.where(sink > float("-inf"), 1.0, 0.0)
    acc = tl.zeros(queries.shape, tl.float32)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK)
        inside = token < end
        read = head_mask(inside[:, None], columns, D)
        page = tl.load(pages + token // PAGE, mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        at = slot[:, None] * ROW + columns[None, :]
        # The tensor cores take both operands in one dtype; it holds every FP8 number exactly.
        keys = tl.load(k_head + at, mask=read, other=0.0).to(queries.dtype)
        logits = tl.dot(queries, tl.trans(keys)) * scale
        logits = tl.where(inside[None, :], logits, float("-inf"))
        running = tl.maximum(largest, tl.max(logits, axis=1))
        weights = tl.exp2(logits - running[:, None])
        shrink = tl.exp2(largest - running)
        # Slots past the end may hold anything, NaN too: read them as 0.
        values = _as_operand(tl.load(v_head + at, mask=read, other=0.0), queries.dtype)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
        largest = running
    total = tl.where(total == 0.0, 1.0, total)
    return acc / total[:, None], largest + tl.log2(total)


@triton.jit
def half_queries(queries: tl.tensor, scale: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The queries [rows, D], of any range, in fp16, and the factors [rows, 1] of their logits.

    One instruction converts two FP8 numbers to fp16; bf16 takes three. A row is divided by the
    power of two below its largest number, so that only far smaller numbers are rounded.
    """
    largest = tl.max(tl.abs(queries.to(tl.float32)), axis=1)
    # The exponents of zero, of denormal and of the largest rows have no inverse.
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    up = (exponent << 23).to(tl.float32, bitcast=True)
    return (queries.to(tl.float32) * down[:, None]).to(tl.float16), scale * up[:, None]
