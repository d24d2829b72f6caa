"""SGLang's paged KV allocator without its Triton kernels.

For SGLang up to 0.5.20; the allocator of 0.5.23 has no need of them on a platform without Triton.
"""

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """Same pages in the same order as the stock allocator, computed in torch."""

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
        """Slots [extend_num_tokens] of tokens [prefix_lens, seq_lens), request after request.

        None if pages run out. `last_loc` [B] is the slot of each request's last cached token, -1 if
        it has none; `num_new_pages` is not needed here.
        """
        return self._alloc(prefix_lens_cpu, seq_lens_cpu, last_loc)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Slots [B] for one token per request at position seq_lens - 1, or None."""
        return self._alloc(seq_lens_cpu - 1, seq_lens_cpu, last_loc)

    def _alloc(
        self, prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        page = self.page_size
        first_new_page = (prefix_lens + page - 1) // page
        new_pages = (seq_lens + page - 1) // page - first_new_page
        num_new_pages = int(new_pages.sum())
        if self.need_sort and num_new_pages > len(self.free_pages):
            self.merge_and_sort_free()
        if num_new_pages > len(self.free_pages):
            return None
        new_tokens = seq_lens - prefix_lens
        row = torch.repeat_interleave(torch.arange(len(new_tokens)), new_tokens)
        within = torch.arange(len(row)) - (new_tokens.cumsum(0) - new_tokens)[row]
        position = prefix_lens[row] + within
        nth_new_page = position // page - first_new_page[row]
        taken = (new_pages.cumsum(0) - new_pages)[row] + nth_new_page
        slots = last_loc[row] + 1 + within
        fresh = nth_new_page >= 0
        slots[fresh] = self.free_pages[taken[fresh]] * page + position[fresh] % page
        self.free_pages = self.free_pages[num_new_pages:]
        return slots.to(torch.int64)
