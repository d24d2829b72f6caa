"""Which requests an audit takes, and what it keeps of them until they are scored."""

import asyncio
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sparrow_sglang.plugin.audit.auditor import Auditor
from sparrow_sglang.plugin.audit.mismatch_log import TOKEN_ROW, MismatchLog, read_mismatch_log
from sparrow_sglang.plugin.audit.recorded import RecordedRequest, skip_reason
from sparrow_sglang.plugin.audit.statistics import SKIPPED
from sparrow_sglang.request_options import RequestOption
from sparrow_sglang.schedule import BudgetSchedule

ACTIVE = BudgetSchedule.fixed(64)


def tokenized(**changes: Any) -> Any:
    """A request with the sampling defaults of Qwen3, and with `changes`."""
    parameters = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    request = SimpleNamespace(
        sampling_params=parameters,
        input_ids=[1, 2],
        return_logprob=False,
        logprob_start_len=-1,
        custom_logit_processor=None,
        input_embeds=None,
        mm_inputs=None,
        session_params=None,
        positional_embed_overrides=None,
    )
    for name, value in changes.items():
        setattr(parameters if hasattr(parameters, name) else request, name, value)
    return request


def test_whatever_a_request_samples_with_it_is_audited() -> None:
    option = RequestOption(ACTIVE)
    for changes in ({}, {"temperature": 1.3}, {"min_p": 0.2}, {"top_k": 1, "temperature": 1.0}):
        assert skip_reason(tokenized(**changes), option, ACTIVE, False) is None


def test_a_request_that_cannot_be_audited_is_counted_by_the_reason() -> None:
    reasons: list[tuple[dict[str, Any], str]] = [
        ({"logit_bias": {"5": 1.0}}, "masked_logits"),
        ({"regex": "a+"}, "masked_logits"),
        ({"min_new_tokens": 3}, "masked_logits"),
        ({"repetition_penalty": 1.1}, "masked_logits"),
        ({"custom_logit_processor": "{}"}, "masked_logits"),
        ({"temperature": 0.1}, "low_temperature"),
        ({"return_logprob": True, "logprob_start_len": 0}, "prompt_logprobs"),
        ({"input_ids": None}, "input"),
        ({"session_params": {}}, "input"),
        ({"custom_params": [1]}, "input"),
    ]
    option = RequestOption(ACTIVE)
    found = [skip_reason(tokenized(**changes), option, ACTIVE, False) for changes, _ in reasons]
    assert found == [reason for _, reason in reasons] and {*found} <= {*SKIPPED}
    # With --enable-strict-thinking the recorded log-probs are those of masked logits.
    assert skip_reason(tokenized(), option, ACTIVE, True) == "masked_logits"


def test_only_responses_under_the_active_schedule_are_audited() -> None:
    others = (None, RequestOption(None), RequestOption(ACTIVE, 32))
    for option in (*others, RequestOption(BudgetSchedule.fixed(96))):
        assert skip_reason(tokenized(), option, ACTIVE, False) == "own_schedule"


def test_nothing_is_audited_while_the_server_decodes_densely() -> None:
    dense = ACTIVE.as_dense()
    assert skip_reason(tokenized(), RequestOption(dense), dense, False) == "dense"


@pytest.mark.parametrize("ending", ["SIGTERM", "Ctrl-C"])
def test_a_server_that_stops_writes_what_it_has_measured(tmp_path: Path, ending: str) -> None:
    """On SIGTERM SGLang first lets requests end; on Ctrl-C the event loop ends."""
    manager: Any = SimpleNamespace(
        server_args=SimpleNamespace(enable_metrics=False),
        model_config=SimpleNamespace(vocab_size=50),
        rid_to_state={},
        is_pause=False,
        gracefully_exit=False,
    )
    log = MismatchLog(tmp_path)
    auditor = Auditor(manager, 1.0, ACTIVE, log, set())

    async def serve() -> None:
        auditor.on_requests([])
        rows = np.zeros(3, TOKEN_ROW)
        rows["request_id"] = "a"
        log.append(rows)
        # Longer than it takes an audit to look for what is due.
        await asyncio.sleep(0.5)
        assert not list(tmp_path.iterdir())
        manager.gracefully_exit = ending == "SIGTERM"
        while manager.gracefully_exit and not read_mismatch_log(tmp_path).num_rows:
            await asyncio.sleep(0.05)

    asyncio.run(serve())
    assert read_mismatch_log(tmp_path)["request_id"].to_pylist() == ["a"] * 3


def test_responses_of_old_weights_are_forgotten_before_and_after_an_update() -> None:
    manager: Any = SimpleNamespace(
        server_args=SimpleNamespace(enable_metrics=False),
        model_config=SimpleNamespace(vocab_size=50),
        is_pause=False,
    )
    auditor = Auditor(manager, 1.0, ACTIVE, None, set())
    queue = auditor._queue

    def answered(name: str) -> None:
        queue.start(RecordedRequest(name, array("i", [1]), None, None, 0, 4))
        queue._recording[name].tokens.append(1)
        queue.finish(name, complete=True)
        assert queue.first is not None

    async def update() -> None:
        answered("before")
        async with auditor.held_back(new_weights=True):
            assert queue.first is None
            # By the old weights, while the update waits for the request to end.
            answered("meanwhile")
        assert queue.first is None

    asyncio.run(update())
    assert auditor.report.requests["dropped"] == 2
