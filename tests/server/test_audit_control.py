"""An audited server can be paused, updated, flushed and emptied at any time, as any other can."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engines import random_prompt
from servers import start_server
from waiting import wait_until

from sparrow_sglang.plugin.launcher.audit import mismatch_log
from sparrow_sglang.plugin.launcher.audit.mismatch_log import read_mismatch_log

CONTEXT = 640
PLAIN = {"temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True}
# Limit of each wait, which takes about a second on an idle machine.
SECONDS = 120.0


class Server:
    """The routes of a server that a training loop calls, and what its audit has logged."""

    def __init__(self, url: str, model: str, log: Path) -> None:
        self.url = url
        self.model = model
        self.log = log
        self.sent = 0

    def post(self, route: str, **fields: Any) -> httpx.Response:
        answer = httpx.post(f"{self.url}/{route}", json=fields, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        return answer

    def generate(self, length: int, count: int = 1) -> set[str]:
        """Ids of further requests with prompts of `length` tokens, which have been answered."""
        first, self.sent = self.sent, self.sent + count
        names = [f"request-{index}-" for index in range(first, self.sent)]
        prompts = [random_prompt(seed, length) for seed in range(count)]
        self.post("generate", input_ids=prompts, sampling_params=PLAIN, rid=names)
        return set(names)

    def audited(self) -> set[str]:
        """Ids of the requests that have been scored so far."""
        return set(read_mismatch_log(self.log)["request_id"].to_pylist())

    def wait_for(self, names: set[str]) -> set[str]:
        """Wait until `names` have been audited; returns the ids of all audited requests."""
        wait_until(lambda: names <= self.audited(), SECONDS)
        return self.audited()

    def wait_until_done(self) -> set[str]:
        """Wait until the audit, which keeps the order of requests, is done with all so far, and so
        holds no slot. Returns the ids of all audited requests."""

        def is_latest_audited() -> bool:
            # A request is dropped if others hold all slots.
            latest = self.generate(20)
            time.sleep(1)
            return latest <= self.audited()

        wait_until(is_latest_audited, SECONDS)
        return self.audited()


@pytest.fixture(scope="module")
def server(
    sharp_llama: str, schedule_file: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("audit") / "log"
    arguments = {
        "attention_backend": "sparrow",
        "sparrow_schedule": schedule_file,
        "sparrow_audit_rate": 1.0,
        "sparrow_audit_log": str(log),
        "context_length": CONTEXT,
        # A score is prefilled in many chunks, so that calls arrive while one runs.
        "chunked_prefill_size": 16,
    }
    with pytest.MonkeyPatch.context() as patch:
        # The server is forked from this process.
        patch.setattr(mismatch_log, "FILE_ROWS", 1)
        with start_server(sharp_llama, **arguments) as url:
            yield Server(url, sharp_llama, log)


def test_pause_update_continue_answers_while_audits_are_queued(server: Server) -> None:
    old = server.generate(400, count=6)
    start = time.monotonic()
    server.post("pause_generation", mode="in_place")
    # Longer than it takes an audit to look for its next request.
    time.sleep(0.5)
    updated = server.post("update_weights_from_disk", model_path=server.model).json()
    assert updated["success"], updated
    scored = server.audited()
    server.post("continue_generation")
    new = server.generate(60, count=2)
    # A wait for the scheduler that the audit gives up takes ten seconds.
    assert time.monotonic() - start < 20
    # Responses of the old weights are not scored any more.
    assert server.wait_for(new) & old <= scored


def test_a_flush_succeeds_while_requests_are_scored(server: Server) -> None:
    names = server.generate(400, count=4)
    wait_until(lambda: names & server.audited(), SECONDS)
    # The next one is being scored now. A flush fails at once while anything runs.
    server.post("flush_cache")
    assert not names <= server.audited()
    # It is lost, the others are not.
    assert len(names - server.wait_until_done()) <= 1


def test_nothing_is_scored_from_release_to_resume(server: Server) -> None:
    # Enough requests that some are not yet scored when the memory is released, however late.
    names = server.generate(300, count=4)
    # The flush fails at once if anything runs, an audit for example.
    server.post("flush_cache")
    server.post("release_memory_occupation")
    released = server.audited()
    assert not names <= released
    time.sleep(0.5)
    server.post("resume_memory_occupation", tags=["weights"])
    time.sleep(0.5)
    assert server.audited() == released
    server.post("resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    # The weights are unchanged, so responses from before the release are scored after all, but for
    # scores that the flush or the release has aborted.
    assert len(names - server.wait_until_done()) <= 2


def test_a_server_that_stops_does_not_wait_for_the_audit(server: Server) -> None:
    """This is the last test of its server."""
    names = server.generate(400, count=4)
    port = int(server.url.rpartition(":")[2])
    [pid] = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }
    process = psutil.Process(pid)
    process.terminate()
    process.wait(SECONDS)
    assert not names <= server.audited()
