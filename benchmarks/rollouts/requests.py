"""The requests of a replayed rollout: groups that share a prompt, all run at once.

In: response lengths and an engine. Out: how long the rollout took, and its tokens and running
sequences at each second.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparrow_sglang.benchmarks.rollouts.lengths import GROUP
from sparrow_sglang.client.endpoint import connect

SAMPLE_S = 1.0
# One message per 16 tokens of a request is fine enough for the curve, and a small load on the host.
STREAM_INTERVAL = 16


@dataclass(frozen=True)
class Request:
    """One sequence: its prompt's token ids and the number of tokens that it generates."""

    prompt: list[int]
    new_tokens: int


@dataclass
class Progress:
    """Tokens so far of each request, and its end in seconds since the start (None: it runs)."""

    tokens: list[int]
    ended_s: list[float | None]
    curve: list[dict[str, float]] = field(default_factory=list)

    def sample(self, seconds: float) -> None:
        """Append a point to the curve; its `tokens_per_s` covers the time since the last point."""
        last = self.curve[-1] if self.curve else {"s": 0.0, "tokens": 0}
        running = [n for n, end in zip(self.tokens, self.ended_s, strict=True) if end is None]
        total = sum(self.tokens)
        self.curve.append(
            {
                "s": seconds,
                "tokens": total,
                # Without a token yet, a request is still waiting or in prefill.
                "running": sum(1 for tokens in running if tokens),
                "unfinished": len(running),
                "tokens_per_s": (total - last["tokens"]) / max(seconds - last["s"], 1e-9),
            }
        )


def make_requests(
    lengths: Sequence[int], prompt_tokens: int, vocab_size: int, seed: int
) -> list[Request]:
    """A request per length; each eight consecutive requests share a random prompt."""
    draw = random.Random(seed)
    requests: list[Request] = []
    for start in range(0, len(lengths), GROUP):
        prompt = draw.choices(range(vocab_size), k=prompt_tokens)
        requests += [Request(prompt, length) for length in lengths[start : start + GROUP]]
    return requests


def replay(engine: Any, requests: Sequence[Request]) -> dict[str, Any]:
    """Run all requests at once to the last token; return the totals and the curve over time.

    The prefix cache is flushed first. Raises `RuntimeError` if a request ends at another length.
    """
    connect(engine).flush_cache(60.0)
    progress = Progress([0] * len(requests), [None] * len(requests))
    seconds: float = engine.loop.run_until_complete(_replay(engine, requests, progress))
    output_tokens = sum(progress.tokens)
    return {
        "sequences": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": output_tokens,
        "longest": max(progress.tokens),
        "seconds": seconds,
        "tokens_per_s": output_tokens / seconds,
        "ended_s": progress.ended_s,
        "curve": progress.curve,
    }


async def _replay(engine: Any, requests: Sequence[Request], progress: Progress) -> float:
    start = time.perf_counter()

    async def follow(index: int, request: Request) -> None:
        answers = await engine.async_generate(
            input_ids=request.prompt,
            sampling_params={
                "max_new_tokens": request.new_tokens,
                "ignore_eos": True,
                "temperature": 1.0,
                "stream_interval": STREAM_INTERVAL,
            },
            stream=True,
        )
        reason = None
        async for answer in answers:
            progress.tokens[index] = answer["meta_info"]["completion_tokens"]
            reason = answer["meta_info"]["finish_reason"]
        progress.ended_s[index] = time.perf_counter() - start
        if progress.tokens[index] != request.new_tokens:
            raise RuntimeError(
                f"sequence {index} ended with {progress.tokens[index]} tokens instead of"
                f" {request.new_tokens}: {reason}"
            )

    async def watch() -> None:
        for count in itertools.count(1):
            await asyncio.sleep(start + count * SAMPLE_S - time.perf_counter())
            progress.sample(time.perf_counter() - start)

    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.gather(*(follow(*each) for each in enumerate(requests)))
    finally:
        watcher.cancel()
    seconds = time.perf_counter() - start
    progress.sample(seconds)
    return seconds
