"""An audited server can be paused, updated, flushed and emptied at any time, as any other can."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from engines import SCHEDULE, random_prompt, sparse
from servers import sparrow_metrics, start_server
from waiting import wait_until

from sparrow_sglang.plugin.launcher.audit import auditor

CONTEXT = 640
PLAIN = {"temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True}
# Limit of each wait, which takes about a second on an idle machine.
SECONDS = 120.0
# Longer than it takes an audit to look for its next request, and to publish what it has done.
A_WHILE = 0.6


class Server:
    """The routes of a server that a training loop calls, and what its audit has done."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model
        self.sent = 0

    def post(self, route: str, **fields: Any) -> httpx.Response:
        answer = httpx.post(f"{self.url}/{route}", json=fields, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        return answer

    def generate(self, length: int, count: int) -> None:
        """Have further requests with prompts of `length` tokens answered."""
        prompts = [random_prompt(seed, length) for seed in range(count)]
        self.post("generate", input_ids=prompts, sampling_params=PLAIN)
        self.sent += count

    def audited(self, outcome: str = "audited") -> int:
        """The number of requests that have been scored so far, or had another `outcome`."""
        return int(sparrow_metrics(self.url)[f'sparrow:audit_requests{{outcome="{outcome}"}}'])

    def audited_in_the_end(self) -> int:
        """The number of requests that have been scored once the audit is done with all so far."""
        wait_until(lambda: self.audited() + self.audited("dropped") == self.sent, SECONDS)
        return self.audited()


@pytest.fixture(scope="module")
def server(sharp_llama: str) -> Iterator[Server]:
    arguments = sparse(SCHEDULE) | {
        "sparrow_audit_rate": 1.0,
        "enable_metrics": True,
        "context_length": CONTEXT,
        # A score is prefilled in many chunks, so that calls arrive while one runs.
        "chunked_prefill_size": 16,
    }
    with pytest.MonkeyPatch.context() as patch:
        # The server is forked from this process.
        patch.setattr(auditor, "_PUBLISH_S", 0.0)
        with start_server(sharp_llama, **arguments) as url:
            yield Server(url, sharp_llama)


def test_pause_update_continue_answers_while_audits_are_queued(server: Server) -> None:
    server.generate(400, count=6)
    start = time.monotonic()
    server.post("pause_generation", mode="in_place")
    time.sleep(A_WHILE)
    updated = server.post("update_weights_from_disk", model_path=server.model).json()
    assert updated["success"], updated
    scored = server.audited()
    server.post("continue_generation")
    server.generate(60, count=2)
    # A wait for the scheduler that the audit gives up takes ten seconds.
    assert time.monotonic() - start < 20
    # Responses of the old weights are not scored any more.
    assert server.audited_in_the_end() == scored + 2


def test_a_flush_succeeds_while_requests_are_scored(server: Server) -> None:
    before = server.audited_in_the_end()
    server.generate(400, count=4)
    wait_until(lambda: server.audited() > before, SECONDS)
    # The next one is being scored now. A flush fails at once while anything runs.
    server.post("flush_cache")
    assert server.audited() < before + 4
    # It is lost, the others are not.
    assert server.audited_in_the_end() >= before + 3


def test_nothing_is_scored_from_release_to_resume(server: Server) -> None:
    before = server.audited_in_the_end()
    # Enough requests that some are not yet scored when the memory is released, however late.
    server.generate(300, count=4)
    # The flush fails at once if anything runs, an audit for example.
    server.post("flush_cache")
    server.post("release_memory_occupation")
    time.sleep(A_WHILE)
    released = server.audited()
    assert released < before + 4
    time.sleep(A_WHILE)
    server.post("resume_memory_occupation", tags=["weights"])
    time.sleep(A_WHILE)
    assert server.audited() == released
    server.post("resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    # The weights are unchanged, so responses from before the release are scored after all, but for
    # scores that the flush or the release has aborted.
    assert server.audited_in_the_end() >= before + 2


def test_a_server_that_stops_does_not_wait_for_the_audit(server: Server) -> None:
    """This is the last test of its server."""
    before = last = server.audited_in_the_end()
    server.generate(400, count=4)
    port = int(server.url.rpartition(":")[2])
    [pid] = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }
    process, deadline = psutil.Process(pid), time.monotonic() + SECONDS
    process.terminate()
    while process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        with suppress(httpx.HTTPError):
            last = server.audited()
    assert last < before + 4
