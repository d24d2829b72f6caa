"""What of a request that ends at its prefill may enter the prefix tree, by SGLang's own records."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import ComponentType

from sparrow_sglang.plugin.scheduler.scheduler_hooks import _cache_prefilled

PREFILLED = 150


class Tree:
    page_size = 16

    def __init__(self) -> None:
        self.inserted: list[int] = []

    def checkpoint(self, req: Any, up_to: int) -> None:
        self.inserted.append(up_to)


@pytest.mark.parametrize(
    ("cacheable", "fields", "evicted", "inserted"),
    [
        (151, {}, 0, True),
        (144, {}, 0, True),
        # `strip_thinking_cache` frees what lies behind.
        (143, {}, 0, False),
        (151, {"cache_protected_len": 144}, 0, False),
        # KV in a pool for windows that decode has freed.
        (151, {}, 16, False),
        # A state of linear attention, which decode has overwritten.
        (151, {"mamba_pool_idx": torch.tensor([1])}, 0, False),
    ],
)
def test_whole_pages_of_a_prompt_enter_the_tree_where_they_are_whole(
    cacheable: int, fields: dict[str, Any], evicted: int, inserted: bool
) -> None:
    kv = ReqKvInfo(req_pool_idx=1, kv_committed_len=PREFILLED + 1, **fields)
    if evicted:
        kv.set_evicted_seqlen(ComponentType.SWA, evicted)
    req = SimpleNamespace(
        kv=kv,
        extend_range=SimpleNamespace(end=PREFILLED),
        owned_kv_len=lambda: cacheable,
        skip_radix_cache_insert=False,
    )
    tree: Any = Tree()
    _cache_prefilled(req, tree)
    assert tree.inserted == ([PREFILLED] if inserted else [])
