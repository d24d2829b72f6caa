"""A policy on the disk: as a model that others load, and as the exact state of its training."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp

from sparrow_sglang.rl.policy.dense_policy import DensePolicy


def save_model(policy: DensePolicy, folder: Path | None) -> None:
    """Write the weights and their config in the compute dtype, for transformers and SGLang.

    Weights in fp32 would be served in another dtype than they were trained in: SGLang serves fp32
    checkpoints as float16. All ranks must call this; those that only take part in gathering the
    weights give None.
    """
    dtype = policy.compute_dtype
    exported = {}
    for name, weight in policy.named_weights():
        if folder is not None:
            exported[name] = weight.to("cpu", dtype)
    if folder is None:
        return
    policy.model.save_pretrained(folder, state_dict=exported)
    config = copy.deepcopy(policy.model.config)
    config.dtype = dtype
    config.save_pretrained(folder)


def save_state(policy: DensePolicy, folder: Path) -> None:
    """Write the exact weights and the optimizer's state, each rank its own rows."""
    with _quiet_about_one_process():
        dcp.save(policy.state_dict(), checkpoint_id=folder)


def load_state(policy: DensePolicy, folder: Path) -> None:
    """Take over what any number of ranks have written by `save_state`."""
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
