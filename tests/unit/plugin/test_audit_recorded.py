"""What an audit keeps of a request, in bytes."""

import sys
from array import array
from types import SimpleNamespace
from typing import Any

from sparrow_sglang.mismatch.scores import TOP_K
from sparrow_sglang.plugin.audit.recorded import MAX_TOKENS, RecordedRequest


def test_a_kept_token_takes_as_much_memory_as_is_said() -> None:
    request = RecordedRequest("one", array("i"), None, None, 0, TOP_K)
    answer: Any = SimpleNamespace(
        output_token_logprobs_val=[[-0.5]],
        output_token_logprobs_idx=[[7]],
        output_top_logprobs_val=[[[-0.5 - rank for rank in range(TOP_K)]]],
        output_top_logprobs_idx=[[list(range(TOP_K))]],
    )
    for _ in range(5000):
        request.record(answer, 0)
    assert request.held_tokens == 5000
    arrays = (request.tokens, request.logprobs, request.top_ids, request.top_logprobs)
    assert sum(map(sys.getsizeof, arrays)) / 5000 * MAX_TOKENS < 200e6
