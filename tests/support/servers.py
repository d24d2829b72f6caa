"""Real SGLang servers behind a URL that start in seconds."""

import multiprocessing
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
from engines import SERVER_ARGS, import_for_fork, kill
from ports import free_port
from rounds import choose_rounds
from waiting import wait_until

START_S = 120.0


@contextmanager
def start_server(model_path: str, **server_args: Any) -> Iterator[str]:
    """The URL of a server that is forked from this process, as `start_engine` forks an engine."""
    import_for_fork()
    # Imported before the fork, as the import would take each forked process seconds.
    from sglang.srt.entrypoints import http_server

    port = free_port()
    arguments = SERVER_ARGS | {"model_path": model_path, "host": "127.0.0.1", "port": port}
    arguments |= {"skip_server_warmup": True, "log_level": "error"} | server_args
    with forked(port, _serve, http_server, arguments) as url:
        yield url


@contextmanager
def forked(port: int, serve: Callable[..., None], *arguments: Any) -> Iterator[str]:
    """The URL of a server that `serve(*arguments)` runs at `port`, in a forked process."""
    process = multiprocessing.get_context("fork").Process(
        target=_in_a_session_of_its_own, args=(serve, *arguments)
    )
    process.start()
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _is_healthy(url, process), START_S)
        yield url
    finally:
        _kill_family(process.pid)
        process.join()


def _in_a_session_of_its_own(serve: Callable[..., None], *arguments: Any) -> None:
    # With its own session, `engines.start_engine` does not take it for a process of an engine.
    os.setsid()
    serve(*arguments)


def _serve(http_server: Any, arguments: dict[str, Any]) -> None:
    from sglang.srt.server_args import ServerArgs

    from sparrow_sglang.plugin.launcher import control

    async def nothing(manager: Any) -> None:
        """The speed of this machine does not decide which steps are dense."""

    control._measure_all = nothing
    choose_rounds()
    http_server.launch_server(ServerArgs(**arguments))


def sparrow_metrics(url: object) -> dict[str, float]:
    """`name{labels}` -> value of this package's metrics."""
    lines = httpx.get(f"{str(url).rstrip('/')}/metrics/", follow_redirects=True).text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("sparrow:")]
    return {name: float(value) for name, value in pairs}


def exported(url: object) -> dict[str, dict[str, set[str]]]:
    """Metric -> label -> values, as a scrape sees them."""
    # prometheus_client could parse this, but a server forked from a process that has imported it
    # does not export what its own processes count.
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in httpx.get(f"{str(url).rstrip('/')}/metrics/").text.splitlines():
        if sample := re.match(r"([\w:]+)(?:\{(.*)\})? \S+$", line):
            name, labels = sample.groups()
            for label, value in re.findall(r'(\w+)="([^"]*)"', labels or ""):
                found[name][label].add(value)
            found[name]
    return found


def running_requests(client: httpx.Client) -> int:
    # Older versions have this route, and an error in the other one where metrics are on.
    answer = client.get("/get_load")
    if answer.status_code == 200:
        return int(answer.json()[0]["num_reqs"])
    return int(client.get("/v1/loads").json()["loads"][0]["num_running_reqs"])


def _is_healthy(url: str, process: Any) -> bool:
    if not process.is_alive():
        raise RuntimeError("the server died while it started; its traceback is on stderr")
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _kill_family(pid: int | None) -> None:
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    kill(family)
