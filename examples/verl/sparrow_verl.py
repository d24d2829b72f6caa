"""`sparrow/accept_p05` among verl's own metrics, by two of verl's extension points. An agent loop
has the server record some generations, and requests their exact acceptance rates before the weights
change. A sampler of the replay buffer hands the rates of a batch to verl's trainer as metrics.
Servers record if SPARROW_RECORD is <slots>x<tokens>: the slots of all agent loop workers together,
and the tokens of the longest response."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import ray
import transfer_queue
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.mismatch.exact_rates import comparing_request, exact_rates, record_into
from sparrow_sglang.mismatch.tail import bins_of_lengths
from sparrow_sglang.rl.metrics import acceptance_metrics
from sparrow_sglang.schedules.schedule import PAGE_SIZE

RATES = "sparrow_acceptance"


class Slots:
    """Slots of the servers that belong to this agent loop worker, one generation each at a time."""

    def __init__(self, count: int) -> None:
        # verl calls its workers agent_loop_worker_<number>_<random>.
        worker = int((ray.get_runtime_context().get_actor_name() or "___0_").split("_")[3])
        self._free = list(range(worker * count, (worker + 1) * count))
        recorded = os.environ.get("SPARROW_RECORD", "0x0")
        if count and self._free[-1] >= int(recorded.split("x")[0]):
            raise ValueError(
                f"SPARROW_RECORD={recorded!r} and slots_per_worker={count}: expected"
                " <slots>x<tokens> with slots_per_worker slots for each of agent.num_workers"
            )

    @contextmanager
    def one(self) -> Iterator[int | None]:
        """A slot, or None if all are in use."""
        slot = self._free.pop() if self._free else None
        try:
            yield slot
        finally:
            if slot is not None:
                self._free.append(slot)


worker_slots = cache(Slots)


class RecordingClient:
    """verl's client of the rollout servers; where a slot is free, it brings back rates as well."""

    def __init__(self, client: LLMServerClient, slots: Slots) -> None:
        self._client = client
        self._slots = slots

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **more: Any,
    ) -> TokenOutput:
        with self._slots.one() as slot:
            # The rates are of distributions at temperature 1; validation is greedy by default.
            recorded = slot is not None and sampling_params["temperature"] == 1
            if recorded:
                params = sampling_params.get("custom_params") or {}
                recording = params | record_into(slot, len(prompt_ids))
                sampling_params = sampling_params | {"custom_params": recording}
            output = await self._client.generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **more
            )
            if recorded and len(output.token_ids) > 1:
                rates = await self._rates(request_id, slot, prompt_ids, output.token_ids)
                output.extra_fields[RATES] = rates
            return output

    async def _rates(
        self, request_id: str, slot: int, prompt: Sequence[int], response: Sequence[int]
    ) -> list[float]:
        """Acceptance rates of all tokens of the response but the first; NaN as in `exact_rates`."""
        # The same request goes to the same server again.
        name, server = await self._client._acquire_server(request_id)
        try:
            host, port = await server.get_server_address.remote()
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            request = comparing_request(slot, prompt, response)
            [answer] = await asyncio.to_thread(connect(url).generate, [request])
        finally:
            self._client._release_server(name, request_id)
        return exact_rates(answer).tolist()


class SparrowAgentLoop(SingleTurnAgentLoop):
    """verl's loop of one turn, with `RecordingClient`. Each worker records `slots_per_worker`
    generations at a time. `sampling` are further sampling parameters of SGLang for all requests."""

    def __init__(
        self,
        *args: Any,
        server_manager: LLMServerClient,
        slots_per_worker: int = 0,
        sampling: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        client = RecordingClient(server_manager, worker_slots(slots_per_worker))
        super().__init__(*args, server_manager=client, **more)
        self._sampling = dict(sampling or {})

    async def run(self, sampling_params: dict[str, Any], **more: Any) -> AgentLoopOutput:
        return await super().run(sampling_params | self._sampling, **more)


class TailSampler(ReplayBuffer):
    """verl's replay buffer of the synchronous trainer, with the tail of each batch as metrics.
    `sampler_kwargs`: `bin_tokens`, positions per bin; `poll_interval` in seconds, 2 by default."""

    def __init__(self, *args: Any, sampler_kwargs: Any, **more: Any) -> None:
        poll = sampler_kwargs.get("poll_interval", 2.0)
        super().__init__(*args, sampler_kwargs=sampler_kwargs, poll_interval=poll, **more)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        batch, metrics = super().sample(
            global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )
        if partition_id == "train":
            metrics |= self._tail(batch)
        return batch, metrics

    def _tail(self, batch: Any) -> dict[str, float]:
        fields = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"]
        )
        rates: list[float] = []
        positions: list[int] = []
        for tag, extra in zip(batch.tags, fields.pop("extra_fields").tolist(), strict=True):
            recorded = extra.get(RATES) or ()
            rates += recorded
            # The first token of a response comes out of prefill, which is dense.
            positions += range(tag["prompt_len"] + 1, tag["prompt_len"] + 1 + len(recorded))
        measured = ~np.isnan(rates)
        if not measured.any():
            return {}
        bins = bins_of_lengths(positions, self.sampler_kwargs["bin_tokens"], PAGE_SIZE)
        tail = acceptance_metrics(np.array(rates)[measured], bins[measured])
        return tail | {"sparrow/accept_tokens": float(measured.sum())}
