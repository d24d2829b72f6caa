"""The trained weights of a run: policy and adapter, in memory and on disk."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from sparrow_sglang.errors import SparrowError
from sparrow_sglang.provenance import device_name
from sparrow_sglang.rl.adapter_gate import choose_scale
from sparrow_sglang.rl.batch import Batch
from sparrow_sglang.rl.config import EngineConfig, TrainConfig
from sparrow_sglang.rl.distill import ADAPTER, SparseAdapter
from sparrow_sglang.rl.engines.local_engine import LocalEngine, NamedTensors
from sparrow_sglang.rl.loss import MiniBatchLoss
from sparrow_sglang.rl.metrics import Acceptance
from sparrow_sglang.rl.policy.dense_policy import DensePolicy
from sparrow_sglang.rl.policy.shards import ALONE, Ranks
from sparrow_sglang.rl.rollout import RolloutEngine
from sparrow_sglang.schedules.schedule import BudgetSchedule

if TYPE_CHECKING:
    from sparrow_sglang.rl.cluster.remote_learner import RemoteLearner

Learner: TypeAlias = "LocalLearner | RemoteLearner"
"""The trained weights of a run, in this process or in those of a cluster."""

_ADAPTER_STATE = "adapter.pt"


class TrainersLost(SparrowError, RuntimeError):
    """Processes of the learner have ended; the run must resume from its newest checkpoint."""


@dataclass(frozen=True, eq=False)
class Scored:
    """Dense log-probs and entropies, fp32 [N] on the CPU, of all response tokens of a batch."""

    logprobs: torch.Tensor
    entropies: torch.Tensor


@dataclass(frozen=True, eq=False)
class Updated:
    """`scored` is from before the update, also for responses that `score` left to it.
    `skipped_in_a_row` counts optimizer steps skipped since the last one taken."""

    metrics: dict[str, float]
    scored: Scored
    skipped_in_a_row: int


class LocalLearner:
    """The weights in this process. With several `policy.ranks`, all call the same methods with the
    same arguments."""

    def __init__(
        self,
        config: TrainConfig,
        policy: DensePolicy,
        adapter: SparseAdapter | None = None,
    ) -> None:
        self.policy = policy
        self.adapter = adapter
        self._config = config

    @classmethod
    def load(cls, config: TrainConfig, ranks: Ranks = ALONE) -> "LocalLearner":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        policy = DensePolicy.load(config.model, config.optimizer, device, ranks)
        # The adapter's initial values are drawn.
        torch.manual_seed(config.seed)
        adapter = SparseAdapter(policy, config.distill) if config.distill.enabled else None
        return cls(config, policy, adapter)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.policy.compute_dtype

    def device_name(self) -> str:
        return device_name()

    def open_engine(
        self, config: EngineConfig, model_path: str, defaults: Mapping[str, Any]
    ) -> RolloutEngine:
        """`config.server_args` take precedence over `defaults`."""
        return LocalEngine(model_path, config.schedule, **{**defaults, **config.server_args})

    def close(self) -> None:
        """End the processes of the learner, if it has any."""

    def score(self, batch: Batch) -> Scored:
        """With one mini-batch only responses outside the loss: `update` replaces the zeros of the
        others, from a policy that is still the same."""
        settings, count = self._config, len(batch.advantages)
        by_update = settings.algorithm.mini_batches == 1
        scored_here = ~batch.in_loss if by_update else torch.ones_like(batch.in_loss)
        sequences, tokens = batch.sequences_of(scored_here)
        scored = Scored(torch.zeros(count), torch.zeros(count))
        if sequences:
            parts = self.policy.score(sequences, settings.rollout.temperature)
            scored.logprobs[tokens], scored.entropies[tokens] = map(torch.cat, parts)
        return scored

    def acceptance(self, batch: Batch, schedule: BudgetSchedule | None) -> Acceptance | None:
        """Exact acceptance rates of some responses, of an actor with the current adapter; None
        without a schedule or measured responses."""
        chosen = batch.sample_evenly(self._config.mismatch.sequences)
        if schedule is None or not chosen.rollouts:
            return None
        adapted = self.adapter.delivered if self.adapter else nullcontext
        temperature = self._config.rollout.temperature
        rates = self.policy.acceptance(chosen.sequences, schedule, adapted, temperature)
        return Acceptance.of(chosen.rollouts, np.concatenate(rates), schedule)

    def update(self, batch: Batch, scored: Scored, lr: float) -> Updated:
        """One optimizer step per mini-batch; metrics are means over those taken. Raises
        `FloatingPointError` if weights are not finite afterwards."""
        policy, settings = self.policy, self._config.algorithm
        for group in policy.optimizer.param_groups:
            group["lr"] = lr
        rows: list[dict[str, float]] = []
        skipped = 0
        by_update = settings.mini_batches == 1
        for sequences, tokens in batch.mini_batches(settings.mini_batches):
            loss = MiniBatchLoss(
                batch.rollout_logprobs[tokens],
                batch.advantages[tokens],
                settings,
                None if by_update else scored.logprobs[tokens],
            )
            entropies = torch.zeros(len(tokens)) if by_update else None
            norm = policy.loss_step(sequences, loss, self._config.rollout.temperature, entropies)
            if entropies is not None:
                scored.logprobs[tokens] = policy.ranks.all_reduce(loss.seen)
                scored.entropies[tokens] = entropies
            if isfinite(norm):
                rows.append(policy.ranks.total(loss.metrics) | {"actor/grad_norm": norm})
            else:
                skipped += 1
        if rows:
            self._require_finite()
        means = {name: float(np.mean([row[name] for row in rows])) for name in (rows or [{}])[0]}
        counts = {"actor/optimizer_steps": float(len(rows)), "actor/skipped_steps": float(skipped)}
        return Updated(means | counts | {"actor/lr": lr}, scored, policy.optimizer.skipped_in_a_row)

    def distill(self, batch: Batch, schedule: BudgetSchedule | None) -> dict[str, float]:
        """One step of the adapter towards the policy of the next rollouts. Its scale is then chosen
        on the responses that `acceptance` measures, which the step does not learn from if there are
        others."""
        if self.adapter is None or schedule is None:
            return {}
        measured = self._config.mismatch.sequences
        chosen = batch.holdout_of(measured).sample_evenly(self._config.distill.sequences)
        if not chosen.rollouts:
            return {}
        temperature = self._config.rollout.temperature
        metrics = self.adapter.step(chosen.sequences, schedule, temperature)
        held_out = batch.sample_evenly(measured)
        return metrics | choose_scale(self.adapter, self.policy, held_out, schedule, temperature)

    def deliver(self, engine: RolloutEngine, version: str, adapted: bool) -> str | None:
        """Have `engine` sample from the weights as they are now, with the adapter if `adapted`.
        Returns the adapter's name for requests, if they need it."""
        # An engine on the same device cannot use memory that PyTorch's allocator keeps cached.
        torch.cuda.empty_cache()
        engine = cast(LocalEngine, engine)
        engine.resume()
        engine.update_weights(self.weights(adapted, engine.dtype), version)
        if not adapted or (adapter := self.unmerged_adapter) is None:
            return None
        engine.set_adapter(ADAPTER, adapter.tensors(), adapter.lora_config())
        return ADAPTER

    def weights(self, adapted: bool, dtype: torch.dtype) -> NamedTensors:
        """The weights for an engine, rounded to its `dtype`; all ranks must iterate over all."""
        if adapted and self.adapter is not None and self._config.distill.delivery == "merged":
            return self.adapter.merged_weights(dtype)
        return self.policy.named_weights(dtype)

    @property
    def unmerged_adapter(self) -> SparseAdapter | None:
        unmerged = self.adapter is not None and self._config.distill.delivery == "lora"
        return self.adapter if unmerged and self.adapter and self.adapter.scale > 0 else None

    def _require_finite(self) -> None:
        finite = self.policy.optimizer.is_finite()
        if not finite or (self.adapter and not self.adapter.is_finite()):
            raise FloatingPointError(
                "weights or moments are not finite; expected a lower optimizer.lr or grad_clip"
            )

    def save(self, folder: Path) -> None:
        """Each rank writes its shards of the exact state, the first one `model/` and `adapter/`.
        Raises `FloatingPointError` on a state that is not finite, before anything is written."""
        self._require_finite()
        first = self.policy.ranks.rank == 0
        save_model(self.policy, folder / "model" if first else None)
        if self.adapter is not None and first:
            self.adapter.save(folder / "adapter")
            torch.save(self.adapter.state_dict(), folder / _ADAPTER_STATE)
        save_state(self.policy, folder / "training")

    def restore(self, folder: Path) -> None:
        load_state(self.policy, folder / "training")
        if self.adapter is not None:
            # `weights_only=False` as in the other files of a checkpoint, which `save` has written.
            state = torch.load(folder / _ADAPTER_STATE, map_location="cpu", weights_only=False)
            self.adapter.load_state_dict(state)


def save_model(policy: DensePolicy, folder: Path | None) -> None:
    """Write weights and config in the compute dtype; fp32 checkpoints would be served as float16.
    All ranks must call this, all but the first with None."""
    dtype = policy.compute_dtype
    exported = {}
    for name, weight in policy.named_weights(dtype):
        if folder is not None:
            exported[name] = weight.cpu()
    if folder is None:
        return
    model = policy.model
    generation = model.generation_config
    # transformers refuses to write some generation configs that it reads, such as a temperature
    # without do_sample. They are written as they were read.
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=exported)
    finally:
        model.generation_config = generation
    (folder / GENERATION_CONFIG_NAME).write_text(generation.to_json_string(), "utf-8")
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(folder)


def save_state(policy: DensePolicy, folder: Path) -> None:
    with _quiet_about_one_process():
        dcp.save(policy.state_dict(), checkpoint_id=folder)


def load_state(policy: DensePolicy, folder: Path) -> None:
    state = policy.state_dict()
    with _quiet_about_one_process():
        dcp.load(state, checkpoint_id=folder)
    policy.load_state_dict(state)


@contextmanager
def _quiet_about_one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch warns on each call that there is no process group.
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield
