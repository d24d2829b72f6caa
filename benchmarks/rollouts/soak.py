"""Soak test: servers under random load, and the invariants that are checked under it.

`python -m sparrow_sglang.benchmarks.rollouts.soak` runs it.

The load is good, bad, aborted and abandoned requests of many lengths, schedule switches and forced
retraction, on one server or several that share a GPU. Nothing may crash, hang or leak, and every
live landmark must be the mean of its page, also while requests run. Out: the figures as JSON.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from sparrow_sglang.benchmarks.options import (
    MODELS,
    benchmark_parser,
    known_models,
    prepare_out,
    require_cuda,
    settings,
)
from sparrow_sglang.benchmarks.processes import (
    START_S,
    ProcessFailed,
    Server,
    free_port,
    log_end,
    logged_process,
    server_flags,
    until_healthy,
)
from sparrow_sglang.benchmarks.result_files import Results
from sparrow_sglang.benchmarks.rollouts.soak_load import Load, Traffic
from sparrow_sglang.benchmarks.rollouts.word_tokenizer import CHAT_TEMPLATE, save_shapes
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.command_line import count

MEMORY_GB = 60.0
SCHEDULES = ("fixed-512", "fixed-1024", "fixed-2048")
RSS_GROWTH = 0.05
GPU_GROWTH_MIB = 256.0

DESCRIPTION = """\
Put servers under random load for some minutes and check what must hold: no crash, no leaked page,
flat memory, every live landmark right. Weights are random; nothing is downloaded. The exit code is
1 if anything was wrong.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.rollouts.soak --seconds 600
  python -m sparrow_sglang.benchmarks.rollouts.soak --servers 3 --seconds 600
  python -m sparrow_sglang.benchmarks.rollouts.soak --backend flashinfer    # stock SGLang
"""


@dataclass
class Soaked:
    """One server under load, and what was observed of it."""

    server: Server
    load: Load
    sparse: bool
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    rss_mib: list[float] = field(default_factory=list)

    async def run(self, clients: int, seconds: float, check_s: float) -> None:
        """Load the server and check it while it is loaded."""
        checking = asyncio.ensure_future(self._check(check_s))
        await self.load.run(clients, seconds)
        checking.cancel()
        # A check that has paused the server is shielded from the cancellation and resumes it.
        (ended,) = await asyncio.gather(checking, return_exceptions=True)
        if isinstance(ended, Exception):
            problem = f"checks ended early: {type(ended).__name__} {str(ended)[:300]}"
            self.load.problems.append(problem)

    def start_counting(self) -> None:
        """Forget what was counted so far, but no problem; requests from now on are others."""
        self.load.done.clear()
        self.load.tokens = self.load.retractions = 0
        self.load.seed += 1
        self.counts.clear()

    async def _check(self, every_s: float) -> None:
        draw = random.Random(self.seed)
        for turn in range(1, sys.maxsize):
            await asyncio.sleep(every_s)
            self.rss_mib.append(resident_mib(self.server))
            if not self.sparse:
                continue
            await asyncio.shield(asyncio.ensure_future(self._check_pages()))
            if turn % 4 == 0:
                await self._call("schedule", schedule=draw.choice(SCHEDULES))
                self.counts["schedule_switches"] += 1

    async def _check_pages(self) -> None:
        """Compare landmarks with their pages, also for running requests."""
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120) as http:
            try:
                await http.post("/pause_generation", json={"mode": "in_place"})
                answer = await self._call("landmarks")
            except httpx.HTTPError as error:
                self.load.problems.append(f"pause: {type(error).__name__} {error}")
                return
            finally:
                await http.post("/continue_generation", json={})
        if answer is not None:
            self.counts["page_checks"] += 1
            self.counts["pages_checked"] += answer["pages"]
            most = max(self.counts["most_pages_at_once"], answer["pages"])
            self.counts["most_pages_at_once"] = most

    async def _call(self, method: str, **fields: Any) -> dict[str, Any] | None:
        try:
            return await asyncio.to_thread(
                lambda: connect(self.server.url).call_sparrow(method, **fields)
            )
        except Exception as error:
            self.load.problems.append(f"{method}: {type(error).__name__} {str(error)[:300]}")
            return None


def resident_mib(server: Server) -> float:
    """Resident memory of the server's processes; shared memory counts once for each process."""
    process = psutil.Process(server.process.pid)
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        # The child may have ended since it was listed.
        with suppress(psutil.NoSuchProcess):
            total += child.memory_info().rss
    return float(total / 2**20)


def gpu_mib() -> float:
    """Memory of the GPU in use, by all processes."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return float((total - free) / 2**20)


def settle(server: Server) -> int:
    """KV tokens still in use when no request runs or waits and the prefix cache is flushed."""
    deadline = time.monotonic() + 120
    while (now := _state(server))["num_running_reqs"] or now["num_waiting_reqs"]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    connect(server.url).flush_cache(60.0)
    return int(_state(server)["num_used_tokens"])


def _state(server: Server) -> dict[str, Any]:
    state: dict[str, Any] = httpx.get(f"{server.url}/v1/loads", timeout=60).json()["loads"][0]
    return state


def prepare_model(name: str, folder: Path) -> dict[str, Any]:
    """Write shapes of models/ (or a folder of such) into `folder`, with a tokenizer."""
    source = MODELS / name if name in known_models() else Path(name)
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    save_shapes(folder, config)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return config


def command(options: argparse.Namespace, model: Path, port: int, left: int) -> list[str]:
    """Command of one server; `left` servers, this one included, share the GPU's free memory."""
    on_gpu = torch.cuda.is_available()
    words = [sys.executable, "-m", "sglang.launch_server"]
    words += server_flags(model, port, random_weights=True, on_gpu=on_gpu)
    words += ["--attention-backend", options.backend, "--served-model-name", "soak"]
    if options.backend == "sparrow":
        words += ["--sparrow-schedule", ",".join(SCHEDULES[:2])]
    words += ["--max-running-requests", str(options.running)]
    words += ["--max-total-tokens", str(options.pool_tokens)]
    if on_gpu:
        words += ["--mem-fraction-static", f"{0.85 / left:.3f}"]
        # Capturing prefill takes minutes for each server.
        words += ["--disable-prefill-cuda-graph"]
        words += ["--cuda-graph-max-bs-decode", str(options.running)]
    return words


def soak(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start the servers one after the other, load them all at once; one row per server."""
    model = folder / "model"
    model.mkdir()
    config = prepare_model(options.model, model)
    environment = {
        "SGLANG_TEST_RETRACT": "true" if options.retract_steps else "false",
        "SGLANG_TEST_RETRACT_INTERVAL": str(options.retract_steps or 3),
    }
    with ExitStack() as stack:
        soaked = []
        for index in range(options.servers):
            port = free_port()
            log = options.out.with_suffix(f".server{index}.log")
            words = command(options, model, port, options.servers - index)
            url = f"http://127.0.0.1:{port}"
            process = stack.enter_context(logged_process(words, log, os.environ | environment))
            server = Server(process, url, log)
            # Servers start one after the other, as each takes its share of the free memory.
            for _ in until_healthy([server], START_S):
                pass
            print(f"server {index} is up", flush=True)
            traffic = make_traffic(options, config)
            load = Load(url, traffic, seed=index)
            soaked.append(Soaked(server, load, options.backend == "sparrow", index))
        return _measure(soaked, options)


def make_traffic(options: argparse.Namespace, config: dict[str, Any]) -> Traffic:
    """Lengths up to `--longest` tokens, most of them short."""
    longest, vocabulary = options.longest, config["vocab_size"]
    ours = ({"dense": True}, {"schedule": SCHEDULES[1]}, {"kv_budget_tokens": 256})
    return Traffic(
        models=("soak",),
        vocabulary=range(3, vocabulary - 3),
        prompt_tokens=(longest // 64, longest // 16, longest // 4, longest * 3 // 4),
        shared_tokens=(0, 0, longest // 40, longest // 8),
        new_tokens=(16, longest // 64, longest // 16),
        aborted_tokens=longest // 16,
        too_long=config["max_position_embeddings"] + 100,
        too_large=vocabulary + 1000,
        options=(None, *ours) if options.backend == "sparrow" else (None,),
        patience_s=4.0,
        timeout_s=900.0,
    )


def _measure(soaked: list[Soaked], options: argparse.Namespace) -> list[dict[str, Any]]:
    async def together(seconds: float) -> None:
        await asyncio.gather(
            *(one.run(options.clients, seconds, options.check_s) for one in soaked)
        )

    asyncio.run(together(options.warm_s))
    for one in soaked:
        one.start_counting()
    used = [settle(one.server) for one in soaked]
    before, gpu_before = [resident_mib(one.server) for one in soaked], gpu_mib()
    start = time.monotonic()
    asyncio.run(together(options.seconds))
    seconds = time.monotonic() - start
    rows = []
    for index, one in enumerate(soaked):
        leaked = max(used[index], settle(one.server))
        rss = {"before": before[index], "after": resident_mib(one.server)}
        problems = one.load.problems
        checked = asyncio.run(one._call("landmarks")) if one.sparse else None
        if leaked:
            problems.append(f"{leaked} KV tokens are in use, though no request runs")
        if rss["after"] > rss["before"] * (1 + RSS_GROWTH):
            problems.append(f"memory grew: {rss} MiB")
        if one.sparse and (checked is None or not one.counts["page_checks"]):
            problems.append("no landmarks were checked")
        rows.append(
            {
                "server": index,
                "backend": options.backend,
                "seconds": seconds,
                "requests": dict(one.load.done),
                "output_tokens": one.load.tokens,
                "retractions": one.load.retractions,
                **one.counts,
                "leaked_tokens": leaked,
                "rss_mib": rss | {"during": one.rss_mib},
                "problems": problems[:50],
            }
        )
    gpu = {"before": gpu_before, "after": gpu_mib()}
    if gpu["after"] > gpu["before"] + GPU_GROWTH_MIB:
        rows[0]["problems"].append(f"GPU memory grew from {gpu['before']:.0f} MiB: {gpu}")
    for row in rows:
        row["gpu_mib"] = gpu
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("rollouts.soak", DESCRIPTION, EXAMPLES, "soak.json")
    add = parser.add_argument
    seconds = float(os.environ.get("SPARROW_SOAK_S", "600"))
    add("--model", default="qwen3-1.7b", help="folder of models/, or path of one with shapes")
    add("--backend", default="sparrow", help="flashinfer for stock SGLang, to compare with")
    add("--servers", type=count, default=1, help="that share the GPU")
    add("--seconds", type=float, default=seconds, help="of load (SPARROW_SOAK_S)")
    add("--warm-s", type=float, default=30.0, help="of load before memory is compared")
    add("--check-s", type=float, default=10.0, help="between checks of all live landmarks")
    add("--clients", type=count, default=64, help="of each server")
    add("--running", type=count, default=48, help="most requests at a time, and in a CUDA graph")
    add("--pool-tokens", type=count, default=100_000, help="KV pool of each server")
    add("--longest", type=count, default=16384, help="tokens of the longest sequences")
    add("--retract-steps", type=int, default=50, help="steps between forced retractions; 0: none")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write; the exit code is 1 if anything was wrong, 2 without usable options."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.model in known_models():
        require_cuda(parser, MEMORY_GB, "weights and KV cache")
    prepare_out(parser, options.out)
    results = Results(options.out, settings=settings(options))
    with tempfile.TemporaryDirectory() as temporary:
        try:
            rows = soak(options, Path(temporary))
        except (ProcessFailed, httpx.HTTPError, psutil.Error) as error:
            print(f"{parser.prog}: error: {type(error).__name__}: {error}", file=sys.stderr)
            for log in sorted(options.out.parent.glob(f"{options.out.stem}.server*.log")):
                print(f"{log}:\n{log_end(log)}", file=sys.stderr)
            return 1
    results.add(*rows)
    problems = [problem for row in rows for problem in row["problems"]]
    print(f"{len(problems)} problems", *problems, sep="\n  ")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
