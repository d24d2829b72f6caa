"""Whether a run fits into the memory of its GPU, estimated before anything is loaded.

In: a configuration and the config of its model. Out: lines to print, and whether it fits.
"""

from typing import Any

import torch

from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.training_memory import TrainingMemory, training_memory
from sparrow_sglang.rl.config import TrainConfig

_GIB = 2**30
_BF16 = 2


def estimate(config: TrainConfig, model_config: Any) -> tuple[TrainingMemory, int]:
    """Memory of the trainer on each of its GPUs, and bytes that an engine there needs at least.

    The engine's bytes are its weights and the KV of one sequence of full length, in rollouts or
    evaluation; `mem_fraction_static` decides how much more it takes. They are 0 for engines on GPUs
    of their own. Raises `InputError` on a model whose shapes are not known.
    """
    shape = ModelShape.from_config(model_config.to_dict())
    parameters = shape.parameters
    if not model_config.get_text_config().tie_word_embeddings:
        parameters += shape.vocab_size * shape.hidden_size
    prompt, new_tokens = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    memory = training_memory(
        shape,
        parameters,
        max(prompt + new_tokens, config.model.micro_batch_tokens),
        4 if config.model.dtype == "float32" else _BF16,
        gradient_checkpointing=config.model.gradient_checkpointing,
        offload=config.optimizer.offload,
        ranks=config.cluster.trainers if config.cluster else 1,
    )
    if config.cluster and not config.cluster.colocate:
        return memory, 0
    if config.evaluation.every_steps:
        new_tokens = max(new_tokens, config.evaluation_tokens)
    kv = shape.num_layers * shape.layer_kv_width * (prompt + new_tokens) * _BF16
    gpus = config.cluster.gpus_per_engine if config.cluster else 1
    return memory, -(-(parameters * _BF16 + kv) // gpus)


def memory_report(config: TrainConfig, model_config: Any) -> tuple[list[str], bool]:
    """The estimate as lines, and whether it fits; True if this machine has no GPU to compare."""
    memory, engine = estimate(config, model_config)
    phases = {"update, peak": memory.update_peak}
    if config.distill.enabled:
        phases["adapter step, peak"] = memory.adapter_peak
    if engine:
        phases["rollout, with the engine, at least"] = memory.idle + engine
    rows = {
        "weights": memory.weights,
        "optimizer": memory.optimizer,
        "gradients": memory.gradients,
        "inputs of layers, kept for the backward pass": memory.saved,
        "one layer computed again": memory.working,
    }
    if memory.gathered:
        rows["gathered from all trainers"] = memory.gathered
    rows |= phases
    trainers = config.cluster.trainers if config.cluster else 1
    where = "the trainer's GPU" if trainers == 1 else f"each of the trainer's {trainers} GPUs"
    lines = [f"memory of {where}, estimated:"]
    lines += [f"  {name:44} {size / _GIB:7.1f} GiB" for name, size in rows.items()]
    if not torch.cuda.is_available():
        return [*lines, "no GPU on this machine to compare with"], True
    properties = torch.cuda.get_device_properties(0)
    phase, most = max(phases.items(), key=lambda item: item[1])
    fits = most < properties.total_memory
    size = f"{properties.name}: {properties.total_memory / _GIB:.1f} GiB"
    remedy = (
        "fits"
        if fits
        else f"too small for {phase}; expected optimizer.offload = true, model.dtype ="
        ' "bfloat16", shorter responses or a smaller model.micro_batch_tokens'
    )
    return [*lines, f"{size}: {remedy}"], fits
