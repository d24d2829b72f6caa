"""The sparse decode step in plain torch: the definition that the kernels are tested against.

It is also the path that runs on the CPU. Shapes use B requests, Hq query heads, Hkv KV heads,
D head dimensions, N pages of the longest request and K selected pages of the largest budget.
"Logical" page indices count a request's own pages from 0; "physical" ones index the KV pool.
"""

import torch

from sparrow_sglang.attention_backends.landmarks import (
    Int4Landmarks,
    Landmarks,
    MeanLandmarks,
    landmark_dtype,
)
from sparrow_sglang.schedules.schedule import int4_landmark_tokens


def page_landmarks(k_pages: torch.Tensor, int4: bool = False) -> Landmarks:
    """The landmarks of full pages: means of cached (post-RoPE) keys, as they are stored.

    Args:
        k_pages: [P, page_size, Hkv, D], the keys as they stand in the KV pool; of an FP8 pool
            without its scale, see `landmark_dtype`.
        int4: whether landmarks are int4 ones of a few tokens each, or the published rule's mean of
            the whole page.

    Returns:
        Landmarks of the P pages; means are taken in fp32, and rounded once.
    """
    page_size = k_pages.shape[1]
    tokens = int4_landmark_tokens(page_size) if int4 else page_size
    means = k_pages.unflatten(1, (-1, tokens)).mean(dim=2, dtype=torch.float32).transpose(1, 2)
    if int4:
        return Int4Landmarks.of(means)
    return MeanLandmarks(means.to(landmark_dtype(k_pages.dtype)))


def group_queries(q: torch.Tensor, num_kv_heads: int, int4: bool) -> torch.Tensor:
    """The queries that score for each KV head: [..., Hkv, 1 or group, D] fp32 of q [..., Hq, D].

    The mean of the heads that share a KV head under the published rule; each of them where
    landmarks are `int4`.
    """
    groups = q.float().unflatten(-2, (num_kv_heads, -1))
    return groups if int4 else groups.mean(dim=-2, keepdim=True)


def score_pages(q: torch.Tensor, landmarks: Landmarks, page_table: torch.Tensor) -> torch.Tensor:
    """Score every page by query · landmark in fp32: the largest product that the page gives.

    With int4 landmarks, the maximum is over the page's landmarks and the query heads that share a
    KV head; a product that is not a number does not count. Otherwise the query is the mean of these
    heads.

    Args:
        q: [B, Hq, D], queries after RoPE; Hq is a multiple of Hkv.
        landmarks: those of a layer, indexed by physical page.
        page_table: [B, N], physical page of each logical page; entries past a request's end may
            name any existing page.

    Returns:
        [B, Hkv, N] in fp32.
    """
    listed = landmarks.at(page_table)
    int4 = isinstance(listed, Int4Landmarks)
    vectors = listed.unpacked() if isinstance(listed, Int4Landmarks) else listed.values()
    queries = group_queries(q, vectors.shape[2], int4)
    products = torch.einsum("bhgd,bnhmd->bhngm", queries, vectors)
    if isinstance(listed, Int4Landmarks):
        products *= listed.scales.float().transpose(1, 2)[..., None, :]
    return best_product(products)


def best_product(products: torch.Tensor) -> torch.Tensor:
    """The score [...] of products [..., group, M]; -inf where none is a number."""
    if products.shape[-2:].numel() == 1:
        return products[..., 0, 0]
    return products.nan_to_num(-torch.inf, torch.inf, -torch.inf).flatten(-2).amax(-1)


def select_pages(
    scores: torch.Tensor,
    num_pages: torch.Tensor,
    num_selected: torch.Tensor,
    sink_pages: int,
    recent_pages: int,
) -> torch.Tensor:
    """Choose the pages to attend to: sinks, recent pages, and the best-scored between them.

    Ties go to the lower index. Sinks and recent pages are kept whatever their score, and a score
    that is not finite ranks last.

    Args:
        scores: [B, Hkv, N] in fp32.
        num_pages: [B], pages that each request holds, the partial one included.
        num_selected: [B], pages to keep, min(num_pages, KV budget in pages).

    Returns:
        [B, Hkv, max(num_selected)] int64, logical pages in ascending order; in a row with fewer
        pages selected the entries behind them are 0 and mean nothing.
    """
    rank_key = _rank_key(scores, num_pages, sink_pages, recent_pages)
    best_first = rank_key.sort(dim=-1, descending=True, stable=True).indices
    width = int(num_selected.max())
    chosen = best_first[..., :width]
    unused = torch.arange(width, device=scores.device) >= num_selected[:, None]
    # Unused entries sort behind the used ones, then read as 0.
    past_end = scores.shape[-1]
    ascending = chosen.masked_fill(unused[:, None], past_end).sort(dim=-1).values
    return ascending.masked_fill(unused[:, None], 0)


def kept_pages(
    scores: torch.Tensor,
    num_pages: torch.Tensor,
    num_selected: torch.Tensor,
    most_selected: int,
    sink_pages: int,
    recent_pages: int,
) -> torch.Tensor:
    """The choice of `select_pages` as a mask, bool [B, Hkv, N], without waiting for the device.

    `most_selected` is at least the largest of num_selected; only that many pages of a row are
    sorted, because a trainer calls this for every position of a sequence.
    """
    rank_key = _rank_key(scores, num_pages, sink_pages, recent_pages)
    best = rank_key.topk(most_selected, dim=-1).values
    last = (num_selected - 1)[:, None, None].expand(-1, scores.shape[1], 1)
    least = best.gather(-1, last)
    above, ties = rank_key > least, rank_key == least
    room = num_selected[:, None, None] - above.sum(-1, keepdim=True)
    return above | (ties & (ties.cumsum(-1, dtype=torch.int32) <= room))


def _rank_key(
    scores: torch.Tensor, num_pages: torch.Tensor, sink_pages: int, recent_pages: int
) -> torch.Tensor:
    """Sort key of pages [B, Hkv, N]: the greatest are kept, and among equals the lower index."""
    position = torch.arange(scores.shape[-1], device=scores.device)
    exists = position < num_pages[:, None]
    always = exists & ((position < sink_pages) | (position >= num_pages[:, None] - recent_pages))
    # The least finite float, so that only pages past the end stand at -inf.
    rank_key = scores.masked_fill(~scores.isfinite(), torch.finfo(scores.dtype).min)
    rank_key = rank_key.masked_fill(always[:, None], torch.inf)
    return rank_key.masked_fill(~exists[:, None], -torch.inf)


def sparse_decode(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    page_ids: torch.Tensor,
    num_selected: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    sm_scale: float,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exact attention of one query token per request over its selected pages.

    Args:
        q: [B, Hq, D].
        k_buffer: [num_slots, Hkv, D], SGLang's token pool; page p is slots p·page_size onwards.
        v_buffer: [num_slots, Hkv, Dv]. Both in q's dtype or in FP8.
        page_ids: [B, Hkv, K] physical pages in ascending logical order, so that the last of the
            first num_selected entries is the request's last page.
        num_selected: [B], how many entries of page_ids count.
        seq_lens: [B], cached tokens, the current one included.
        sm_scale: factor of the logits, the scale of FP8 keys included.
        v_scale: scale of FP8 values, a factor of the output.
        sinks: [Hq], a learned logit of each query head that joins its softmax as one more token
            with a value of 0 (gpt-oss); sm_scale does not apply to it. None for plain attention.

    Returns:
        [B, Hq, Dv] in q's dtype; the softmax runs over the kept tokens and the sink, in fp32.
    """
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads, width = page_ids.shape[1:]
    head = torch.arange(num_kv_heads, device=q.device)[:, None, None]
    slot = page_ids.long()[..., None] * page_size + torch.arange(page_size, device=q.device)
    rows = (slot * num_kv_heads + head).flatten()

    def gather(buffer: torch.Tensor) -> torch.Tensor:
        # On a CPU, gathering whole rows by one index takes a third of the time of gathering pages
        # by two indices.
        gathered = buffer.view(-1, buffer.shape[-1]).index_select(0, rows)
        return gathered.view(batch, num_kv_heads, width * page_size, -1)

    token = torch.arange(width * page_size, device=q.device)
    tail = (seq_lens - 1) % page_size + 1
    kept_tokens = (num_selected - 1) * page_size + tail
    masked = token >= kept_tokens[:, None]

    grouped = q.view(batch, num_kv_heads, -1, head_dim)
    logits = torch.matmul(grouped.float(), gather(k_buffer).float().transpose(-1, -2)) * sm_scale
    logits = logits.masked_fill(masked[:, None, None], -torch.inf)
    if sinks is None:
        weights = logits.softmax(dim=-1)
    else:
        sink = sinks.float().view(1, num_kv_heads, -1, 1).expand(batch, -1, -1, -1)
        weights = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
    out = torch.matmul(weights, gather(v_buffer).float()) * v_scale
    return out.reshape(batch, num_q_heads, -1).to(q.dtype)
