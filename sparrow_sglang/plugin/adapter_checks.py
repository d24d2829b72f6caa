"""Checks of LoRA adapters on all ways in: pushed, loaded by SGLang's own routes, or at start-up.

SGLang compares factors with the config only at the first request that uses them, where a wrong
shape ends the scheduler, and ignores config fields and tensors that it does not know.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow_sglang.json_values import cut, quoted, read_object
from sparrow_sglang.plugin.scheduler_calls import ControlError
from sparrow_sglang.plugin.state import PROCESS

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, tuple[int, int]]
"""[out, in] of the model's linear modules by the names that PEFT gives them."""

FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
# Projections that the model computes as one; SGLang needs factors for the first and last.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Larger factors and scales lead to NaN log-probs, which end SGLang's sampler and so the scheduler.
_MAX_FACTOR = 1000.0
_MAX_ALPHA = 10_000.0
# Fields of PEFT's config that do not change what the factors add to the model.
_HARMLESS = {
    *("peft_type", "r", "lora_alpha", "target_modules", "lora_dropout", "layers_to_transform"),
    *("layers_pattern", "exclude_modules", "task_type", "inference_mode", "auto_mapping"),
    *("base_model_name_or_path", "revision", "peft_version", "megatron_core", "runtime_config"),
    *("qalora_group_size", "eva_config"),
}
# Ways to initialise that leave the base model's weights alone. PiSSA, OLoRA and others change them.
_PLAIN_INIT = (True, False, None, "gaussian", "orthogonal", "eva")


def check_config(config: Any) -> int:
    """The rank; raises `ControlError` on config fields that SGLang would compute wrongly."""
    if not isinstance(config, Mapping):
        raise ControlError(
            f"config is a {type(config).__name__}: expected the fields of adapter_config.json"
        )
    rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        raise ControlError(f"config: peft_type={quoted(config['peft_type'])}: expected 'LORA'")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ControlError(f"config: r={quoted(rank)}: expected a whole number from 1 on")
    # The comparison is False for NaN, so NaN is refused, too.
    if not (isinstance(alpha, (int, float)) and abs(alpha) <= _MAX_ALPHA):
        raise ControlError(
            f"config: lora_alpha={quoted(alpha)}: expected {-_MAX_ALPHA:g} to {_MAX_ALPHA:g}"
        )
    listed = isinstance(targets, (list, tuple, set)) and all(isinstance(m, str) for m in targets)
    if not listed and targets not in ("all", "all-linear"):
        raise ControlError(
            f"config: target_modules={quoted(targets)}: expected a list of strings, or 'all-linear'"
        )
    for key, value in config.items():
        if key == "init_lora_weights":
            unset, fix = value in _PLAIN_INIT, "convert it to plain LoRA when saving it with PEFT"
        else:
            unset = key in _HARMLESS or not value or (key, value) == ("bias", "none")
            fix = "merge the adapter into the weights instead"
        if not unset:
            raise ControlError(
                f"config: {cut(str(key))}={quoted(value)}: SGLang would ignore it; {fix}"
            )
    return rank


def check_factors(
    tensors: "Mapping[str, torch.Tensor]", rank: int, shapes: Shapes, others: bool = False
) -> set[str]:
    """Check names, shapes and values of `tensors`; return the last name parts of their modules.

    `others` allows modules that are not in `shapes`, of which only rank and values are checked.
    """
    seen: dict[str, set[str]] = {}
    for key, tensor in tensors.items():
        named = FACTOR.fullmatch(key)
        if named is None or not (others or named[1] in shapes):
            raise ControlError(
                f"tensors[{quoted(key)}]: expected PEFT's name of a linear module's factor, such as"
                " base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
            )
        module, side = named[1], named[2]
        _check_shape(key, tensor, side, rank, shapes.get(module))
        seen.setdefault(module, set()).add(side)
        if not bool((tensor.float().abs() <= _MAX_FACTOR).all()):
            raise ControlError(
                f"tensors[{quoted(key)}]: expected numbers from {-_MAX_FACTOR:g} to {_MAX_FACTOR:g}"
            )
    halves = [module for module, sides in seen.items() if len(sides) == 1]
    if halves or not seen:
        raise ControlError(
            f"tensors hold one factor only of {cut(halves[0])}: expected lora_A and lora_B"
            if halves
            else "tensors are empty: expected lora_A and lora_B of at least one module"
        )
    return {module.rpartition(".")[2] for module in seen}


def _check_shape(
    key: str, tensor: "torch.Tensor", side: str, rank: int, shape: tuple[int, int] | None
) -> None:
    got = list(tensor.shape)
    if shape is not None:
        expected = [rank, shape[1]] if side == "A" else [shape[0], rank]
    else:
        # Of experts that are kept together, the first dimension counts them.
        expected = got[:-2] + ([rank, *got[-1:]] if side == "A" else [*got[-2:-1], rank])
    if got != expected or not tensor.is_floating_point():
        raise ControlError(
            f"tensors[{quoted(key)}] is {tensor.dtype} {got}: expected floating-point numbers"
            f" {expected}"
        )


def check_folders(paths: Iterable[str], hf_config: Any) -> None:
    """Raise `ControlError` if SGLang would compute an adapter in a folder, or on the hub, wrongly.

    SGLang itself refuses ranks and modules for which the server has no memory, and adapts modules
    that transformers does not have as linear ones, such as embeddings and experts: of these only
    rank and values are checked.
    """
    try:
        shapes = module_shapes(hf_config)
    except ControlError:
        shapes = {}
    for path in paths:
        try:
            _check_folder(path, shapes)
        except (ValueError, OSError) as error:
            raise ControlError(f"adapter {path}: {error}") from None


def _check_folder(path: str, shapes: Shapes) -> None:
    import torch
    from safetensors.torch import load_file

    folder = Path(path).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    rank = check_config(read_object(folder / "adapter_config.json", "that of PEFT"))
    # SGLang reads the second kind only where there is none of the first.
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("adapter_model*.bin"))
    for file in files:
        is_pickle = file.suffix == ".bin"
        tensors = torch.load(file, "cpu", weights_only=True) if is_pickle else load_file(str(file))
        check_factors(tensors, rank, shapes, others=True)


def check_tensors(manager: Any, lora_ref: Any, tensors: "Mapping[str, torch.Tensor]") -> None:
    """BEFORE hook of a scheduler: `check_factors` of an adapter that comes without a folder."""
    if PROCESS.scheduler is not None:
        check_factors(tensors, manager.configs[lora_ref.lora_id].r, {}, others=True)


def module_shapes(hf_config: Any) -> dict[str, tuple[int, int]]:
    """Shapes of a model's linear modules; raises `ControlError` if transformers cannot make it."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
    except Exception as error:
        # Configs of SGLang's own, such as that of Qwen3.5, lack what transformers reads.
        raise ControlError(
            f"adapters of this model cannot be checked ({cut(str(error))}): expected them merged"
            " into the weights, or in --lora-paths"
        ) from None
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
