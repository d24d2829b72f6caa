"""A policy on disk: as a model that others load, and as the exact state of its training."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from sparrow_sglang.rl.policy.dense_policy import DensePolicy


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
