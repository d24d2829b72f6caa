"""Checks of LoRA adapters, of which SGLang ignores config fields and tensors that it does not know.
Hooks check them where SGLang loads them, from a folder or tensors, at start-up or later. A pushed
one is checked before the former is unloaded, against the model's shapes, too."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sparrow_sglang.json_values import cut, quoted
from sparrow_sglang.plugin.names import uses_sparrow
from sparrow_sglang.plugin.scheduler_calls import ControlError

if TYPE_CHECKING:
    import torch

FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
# The config of the model that this scheduler serves, and its shapes.
_cached_shapes: tuple[Any, Mapping[str, tuple[int, int]]] = None, {}
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
    for problem in _config_problems(config):
        raise ControlError(f"config: {problem}")
    rank: int = config["r"]
    return rank


def _config_problems(config: Any) -> Iterator[str]:
    if not isinstance(config, Mapping):
        yield f"a {type(config).__name__}: expected the fields of adapter_config.json"
        return
    rank, alpha, targets = (config.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        yield f"peft_type={quoted(config['peft_type'])}: expected 'LORA'"
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        yield f"r={quoted(rank)}: expected a whole number from 1 on"
    # The comparison is False for NaN, so NaN is refused, too.
    if not (isinstance(alpha, (int, float)) and abs(alpha) <= _MAX_ALPHA):
        yield f"lora_alpha={quoted(alpha)}: expected {-_MAX_ALPHA:g} to {_MAX_ALPHA:g}"
    listed = isinstance(targets, (list, tuple, set)) and all(isinstance(m, str) for m in targets)
    if not listed and targets not in ("all", "all-linear"):
        yield f"target_modules={quoted(targets)}: expected a list of strings, or 'all-linear'"
    for key, value in config.items():
        if key == "init_lora_weights":
            unset, fix = value in _PLAIN_INIT, "convert it to plain LoRA when saving it with PEFT"
        else:
            unset = key in _HARMLESS or not value or (key, value) == ("bias", "none")
            fix = "merge the adapter into the weights instead"
        if not unset:
            yield f"{cut(str(key))}={quoted(value)}: SGLang would ignore it; {fix}"


def check_factor(
    name: str, tensor: "torch.Tensor", rank: int, shapes: Mapping[str, tuple[int, int]]
) -> tuple[str, str]:
    """The module and the side, A or B, of one of an adapter's tensors. Raises `ControlError` unless
    it is a factor of this rank, of small numbers, and of the module's shape if `shapes` has it.
    SGLang compares shapes only at the first request, where a wrong one ends the scheduler."""
    match = FACTOR.fullmatch(name)
    if match is None:
        raise ControlError(
            f"tensors[{quoted(name)}]: expected PEFT's name of a linear module's factor, such as"
            " base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        )
    # Of experts that are kept together, the first dimension counts them.
    dimension = -2 if match[2] == "A" else -1
    shape = list(tensor.shape)
    if tensor.ndim < 2 or shape[dimension] != rank or not tensor.is_floating_point():
        raise ControlError(
            f"tensors[{quoted(name)}] is {tensor.dtype} {shape}: expected floating-point numbers of"
            f" rank {rank}"
        )
    if not bool((tensor.float().abs() <= _MAX_FACTOR).all()):
        raise ControlError(
            f"tensors[{quoted(name)}]: expected numbers from {-_MAX_FACTOR:g} to {_MAX_FACTOR:g}"
        )
    if match[1] in shapes:
        rows, columns = shapes[match[1]]
        expected = [rank, columns] if match[2] == "A" else [rows, rank]
        if shape != expected:
            raise ControlError(f"tensors[{quoted(name)}] is {shape}: expected {expected}")
    return match[1], match[2]


def check_factors(
    tensors: "Mapping[str, torch.Tensor]", rank: int, shapes: Mapping[str, tuple[int, int]]
) -> set[str]:
    """Check `tensors` against `module_shapes`; return the last parts of their names."""
    factors = []
    for name, tensor in tensors.items():
        factors.append(check_factor(name, tensor, rank, shapes))
        if (module := factors[-1][0]) not in shapes:
            raise ControlError(f"tensors[{quoted(name)}]: the model has no linear module {module}")
    _require_both(factors)
    return {module.rpartition(".")[2] for module, _ in factors}


def _require_both(factors: Collection[tuple[str, str]]) -> None:
    """Raise `ControlError` on modules with A or B alone, whose requests would end the scheduler."""
    sides = Counter(module for module, _ in factors)
    halves = [module for module, count in sides.items() if count == 1]
    if halves or not factors:
        raise ControlError(
            f"tensors: expected lora_A and lora_B of {cut(str(halves or 'modules'))}"
        )


def check_new_adapter(manager: Any, lora_config: Any, *args: Any) -> None:
    """BEFORE hook of a scheduler: `check_config`, wherever the adapter comes from."""
    if _is_ours():
        check_config(lora_config.hf_config)


def check_weight(adapter: Any, name: str, tensor: "torch.Tensor") -> None:
    """BEFORE hook of a scheduler: `check_factor` of each tensor that SGLang reads."""
    if _is_ours():
        check_factor(name, tensor, adapter.config.r, module_shapes(adapter.base_hf_config))


def check_weights(adapter: Any) -> None:
    """BEFORE hook of a scheduler: all factors that the first request needs are there."""
    if not _is_ours():
        return
    names = [*adapter.embedding_layers, *(name for of in adapter.layers for name in of.weights)]
    factors = [(match[1], match[2]) for match in map(FACTOR.fullmatch, names) if match]
    _require_both(factors)
    modules = {module for module, _ in factors}
    absent = module_shapes(adapter.base_hf_config).keys() - modules
    for module in modules:
        parent, _, part = module.rpartition(".")
        for first, *others in FUSED:
            if part in others and f"{parent}.{first}" in absent:
                raise ControlError(
                    f"tensors: expected {first} beside {module}, of zeros if need be"
                )


def _is_ours() -> bool:
    # The adapters of --lora-paths are loaded before the attention backend is built.
    from sglang.srt.runtime_context import get_server_args

    return uses_sparrow(get_server_args())


def empty_model(hf_config: Any) -> Any:
    """transformers' model of this config, without memory for its weights; may raise anything."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config)


def module_shapes(hf_config: Any) -> Mapping[str, tuple[int, int]]:
    """[out, in] of a model's linear modules by the names that PEFT gives them, at the first call in
    a second or two; empty if transformers cannot make the model."""
    global _cached_shapes
    if _cached_shapes[0] is not hf_config:
        import torch

        modules: Iterable[tuple[str, Any]] = ()
        # Configs of SGLang's own, such as that of Qwen3.5, lack what transformers reads.
        with suppress(Exception):
            modules = empty_model(hf_config).named_modules()
        _cached_shapes = (
            hf_config,
            {
                name: (module.out_features, module.in_features)
                for name, module in modules
                if isinstance(module, torch.nn.Linear)
            },
        )
    return _cached_shapes[1]
