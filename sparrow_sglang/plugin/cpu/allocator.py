"""SGLang's paged KV allocator without its Triton kernels. For SGLang up to 0.5.20; the allocator of
0.5.23 has no need of them on a platform without Triton."""

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """Same pages in the same order as the stock allocator, by SGLang's function in torch."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        page = self.page_size
        held = (prefix_lens_cpu + page - 1) // page
        num_new_pages = int(((seq_lens_cpu + page - 1) // page - held).sum())
        if self.need_sort and num_new_pages > len(self.free_pages):
            self.merge_and_sort_free()
        if num_new_pages > len(self.free_pages):
            return None
        slots = torch.empty(extend_num_tokens, dtype=torch.int64)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, slots, page, "cpu")
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        return self.alloc_extend(
            seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens)
        )
