"""The inputs of `sparrow bench attention`: both kernels attend to the same tokens."""

import os
import sys

import pytest
import torch
from programs import run

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.benchmarks.attention_layers import (
    Selection,
    numbers_of_pages,
    pages_of_heads,
    random_selection,
    relative_error,
    sparrow_attention,
)
from sparrow_sglang.planning.model_shape import ModelShape

SHAPE = ModelShape(64, 64, 2, 4, 2, 64, 256)


def attended(layer: Selection) -> torch.Tensor:
    """By the definition, in fp32."""
    count = torch.full((len(layer.q),), layer.page_ids.shape[2])
    pools = layer.q.float(), layer.k.float(), layer.v.float()
    scale = SHAPE.head_dim**-0.5
    return reference.sparse_decode(*pools, layer.page_ids.long(), count, layer.seq_lens, 16, scale)


@pytest.mark.parametrize("length", [100, 112])
def test_pages_of_one_head_are_views_of_the_tokens_that_are_selected(length: int) -> None:
    layer = random_selection(SHAPE, 3, length, 4, 0, "cpu")
    keys = pages_of_heads(layer.k)[numbers_of_pages(layer.page_ids).long()]
    values = pages_of_heads(layer.v)[numbers_of_pages(layer.page_ids).long()]
    assert keys.shape == (3 * 2 * 4, 16, 1, 64)
    # As FlashInfer reads them: a row for each request and KV head, its last page cut off.
    tokens = 3 * 16 + (length - 1) % 16 + 1
    k, v = (pool.view(6, 64, 64)[:, :tokens].float() for pool in (keys, values))
    queries = layer.q.view(6, 2, 64).float()
    out = torch.nn.functional.scaled_dot_product_attention(queries, k, v)
    assert relative_error(out.view(3, 4, 64), attended(layer)) < 1e-5


def test_our_kernel_attends_to_them_too() -> None:
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    code = f"import {__name__} as t; t.require_equal()"
    folders = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": folders}
    run(sys.executable, "-c", code, env=env)


def require_equal() -> None:
    layer = random_selection(SHAPE, 2, 100, 4, 1, "cpu")
    halves = Selection(*(x.half() if x.is_floating_point() else x for x in layer))
    error = relative_error(sparrow_attention(halves, SHAPE)(), attended(halves))
    assert error < 5e-3, error
