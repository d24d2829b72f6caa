"""Which machines get the CPU platform, and the slots that its allocator hands out."""

import random

import pytest
import torch

from sparrow_sglang.plugin import platform
from sparrow_sglang.plugin.cpu.fallbacks import prepare_rank

PAGE = 16


class TestActivate:
    """Which machines get the platform. SGLang's argument class is not under test here."""

    @pytest.fixture(autouse=True)
    def plain_cpu(self, monkeypatch):
        monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
        monkeypatch.setattr(platform.server_args, "install_on_import", lambda: None)
        for device in (torch.cuda, torch.xpu, torch.backends.mps):
            monkeypatch.setattr(device, "is_available", lambda: False)
        monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: None)

    @pytest.mark.parametrize("device", ["cuda", "xpu", "backends.mps"])
    def test_declines_next_to_an_accelerator(self, monkeypatch, device):
        monkeypatch.setattr(f"torch.{device}.is_available", lambda: True)
        assert platform.activate() is None

    def test_declines_when_the_user_asks_for_sglangs_cpu_engine(self, monkeypatch):
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        assert platform.activate() is None


def test_nothing_is_compiled_in_a_rank():
    def refuse(*_):
        raise AssertionError("compiled")

    compiled = torch.compile(torch.neg, backend=refuse)
    with pytest.raises(Exception, match="compiled"):
        compiled(torch.ones(1))
    with torch.compiler.set_stance("default"):
        prepare_rank(tp_size=1)
        assert compiled(torch.ones(1)) == -1


class TestAllocator:
    """Slots must be those of SGLang's own loop over requests."""

    @pytest.fixture
    def allocators(self):
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

        from sparrow_sglang.plugin.cpu.allocator import TorchPagedAllocator

        arguments = (40 * PAGE, PAGE, torch.float32, "cpu", None, False)
        return TorchPagedAllocator(*arguments), PagedTokenToKVPoolAllocator(*arguments)

    @pytest.mark.parametrize("seed", range(8))
    def test_extend(self, allocators, seed):
        from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

        ours, stock = allocators
        draw = random.Random(seed)
        edges = [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE]
        prefix = torch.tensor([draw.choice(edges) for _ in range(4)])
        total = prefix + torch.tensor([draw.randint(1, 3 * PAGE) for _ in range(4)])
        # The prefixes' pages are 100, 200, ...: none that could be handed out again.
        last = torch.where(prefix > 0, (torch.arange(4) + 1) * 100 * PAGE + prefix - 1, -1)
        count = int((total - prefix).sum())
        expected = torch.empty(count, dtype=torch.int64)
        alloc_extend_naive(prefix, total, last, stock.free_pages, expected, PAGE, "cpu")
        got = ours.alloc_extend(prefix, prefix, total, total, last, count)
        assert got.tolist() == expected.tolist()
        used = {slot // PAGE for slot in got.tolist()} & set(range(1, 41))
        assert ours.free_pages.tolist() == [page for page in range(1, 41) if page not in used]

    def test_decode(self, allocators):
        ours, _ = allocators
        lengths = torch.tensor([PAGE, PAGE + 1, 2 * PAGE + 2])
        slots = ours.alloc_decode(lengths, lengths, torch.tensor([1614, 3215, 4801]))
        # Within page 100; at the start of the first free page; within page 300.
        assert slots.tolist() == [1615, 1 * PAGE, 4802]

    def test_none_when_pages_run_out(self, allocators):
        ours, _ = allocators
        lengths = torch.tensor([41 * PAGE])
        zero = torch.zeros(1, dtype=torch.int64)
        assert ours.alloc_extend(zero, zero, lengths, lengths, zero - 1, 41 * PAGE) is None
        assert ours.available_size() == 40 * PAGE
