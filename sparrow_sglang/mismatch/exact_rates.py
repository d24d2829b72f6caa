"""Exact acceptance rates of a generation, from a server that computes them. A server that is
started within `recording` keeps the last hidden state of every decode step of some generations
(`plugin/scheduler/exact_acceptance.py` says why and at what cost). A generation's request names its
slot with `record_into`. The answer to a `comparing_request` holds the generation's rates."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECORD_VARIABLE = "SPARROW_RECORD"
"""Environment variable of a server that records: <slots>x<steps>."""
AUDIT_SLOTS, AUDIT_STEPS = 4, 16384
"""Requests that an audited server records at once, and the most steps that it keeps of each."""
RECORD, COMPARE = "sparrow_record", "sparrow_compare"
"""Names in `custom_params`; the value of each is a slot and the number of prompt tokens."""
RATES = "sparrow_acceptance"
"""Name in an answer's `meta_info`."""


@contextmanager
def recording(slots: int, steps: int) -> Iterator[None]:
    """Engines started within this context record up to `steps` steps of `slots` generations."""
    before = os.environ.get(RECORD_VARIABLE)
    os.environ[RECORD_VARIABLE] = f"{slots}x{steps}"
    try:
        yield
    finally:
        os.environ.pop(RECORD_VARIABLE)
        if before is not None:
            os.environ[RECORD_VARIABLE] = before


def record_into(slot: int, prompt_tokens: int) -> dict[str, Any]:
    """`custom_params` of a generation whose steps are to be kept in `slot`."""
    return {RECORD: [slot, prompt_tokens]}


def comparing_request(slot: int, prompt: Sequence[int], response: Sequence[int]) -> dict[str, Any]:
    """The request, in fields of `GenerateReqInput`, whose answer `exact_rates` reads. Send it after
    the generation that recorded into `slot`, and before another one does. It takes the prompt's KV
    from the prefix cache, which no sparse decode writes
    (`plugin.scheduler.scheduler_hooks.keep_sparse_kv_private`)."""
    return {
        "input_ids": [int(token) for token in (*prompt, *response)],
        "sampling_params": {
            # One token, as SGLang returns `customized_info` of a request only with a token.
            "max_new_tokens": 1,
            "custom_params": {COMPARE: [slot, len(prompt)]},
        },
        # Asking for log-probs keeps a cached prefix from covering response tokens, whose hidden
        # states must be computed.
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
        "log_metrics": False,
    }


def response_logprobs(answer: Mapping[str, Any], response: Sequence[int]) -> NDArray[np.float64]:
    """Dense log-probs [T] of a response, from the answer to a request that prefills it and returns
    log-probs from the prompt's last token on."""
    # The first entry is the prompt's last token, for which SGLang gives no log-prob.
    entries = answer["meta_info"]["input_token_logprobs"][1:]
    # SGLang reports the vocabulary's last token as id 0 here, with the right log-prob.
    same = [entry[1] in (int(token), 0) for entry, token in zip(entries, response, strict=False)]
    assert len(entries) == len(response) and all(same), "scores of another response"
    return np.array([entry[0] for entry in entries], dtype=np.float64)


def exact_rates(answer: Mapping[str, Any]) -> NDArray[np.float64]:
    """Acceptance rates of all response tokens but the first, [T - 1], from the answer to a
    `comparing_request`. The first token comes from prefill; after a retraction so does a later one,
    whose rate is NaN."""
    rates = answer["meta_info"].get(RATES)
    assert rates and rates[0] is not None, "no such slot: expected a server within `recording`"
    return np.array(rates[0], dtype=np.float64)
