"""FP8 copies of weights go stale with each of SGLang's calls that may change the weights."""

from types import SimpleNamespace
from typing import Any

from sparrow_sglang.plugin.hooks import HOOKS
from sparrow_sglang.plugin.lossless.hooks import expire_draft_weights
from sparrow_sglang.plugin.names import WEIGHTS_FIELD

# All other calls of SGLang's updater are taken to change weights.
LEAVE_WEIGHTS = {
    "flush_cache_after_weight_update",
    "record_weight_version_after_update",
    "init_weights_update_group",
    "destroy_weights_update_group",
    "get_weights_by_name",
    # Nothing runs between these and the calls after them, which change weights.
    "begin_weight_update",
    "release_memory_occupation",
    "save_remote_model",
    "save_sharded_model",
}


def test_all_calls_that_change_weights_expire_their_copies() -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Updater,
    )

    calls = {name for name in vars(Updater) if name[0] != "_" and callable(getattr(Updater, name))}
    hooked = [hook.target for hook in HOOKS if hook.function is expire_draft_weights]
    prefix = f"{Updater.__module__}.{Updater.__name__}."
    assert {target.removeprefix(prefix) for target in hooked} >= calls - LEAVE_WEIGHTS
    weights = SimpleNamespace(stale=False)
    for runner in (SimpleNamespace(**{WEIGHTS_FIELD: weights}), SimpleNamespace()):
        updater: Any = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
        expire_draft_weights(None, updater)
    assert weights.stale
