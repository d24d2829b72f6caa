"""Which models the policy computes rightly, and the engine can take over.

In: a model or its config. Out: an error that names what is not supported.
"""

from typing import Any

from transformers import PreTrainedModel

from sparrow_sglang.hf_config import FULL, config_value, text_config

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def config_problems(hf_config: Any) -> list[str]:
    """What in a Hugging Face config is not supported; empty if nothing is."""
    config = text_config(hf_config)
    # transformers holds the experts of a layer in one tensor, under a name that SGLang's loader
    # skips without an error: rollouts would go on with the experts of the start.
    experts = next(filter(None, (config_value(config, name) for name in _EXPERTS)), None)
    wrong = [f"a mixture of {experts} experts"] if experts else []
    layers = set(config_value(config, "layer_types") or ()) - {FULL}
    wrong += [f"layers of type {kind}" for kind in sorted(layers)]
    if not layers and (window := config_value(config, "sliding_window")):
        used = getattr(config, "use_sliding_window", True)
        wrong += [f"sliding_window={window}"] if used else []
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        wrong += [f"{name}={value}"] if (value := config_value(config, name)) else []
    for name in ("logits_scaling", "logit_scale"):
        wrong += [name] if config_value(config, name) not in (None, 1.0) else []
    return wrong


def check_supported(model: PreTrainedModel) -> None:
    """Raises `ValueError` on models that cannot be trained."""
    wrong = config_problems(model.config)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        wrong.append("a bias of the vocabulary projection")
    if wrong:
        raise ValueError(described(model.config, wrong))


def described(hf_config: Any, wrong: list[str]) -> str:
    """One line on the problems of a model."""
    return (
        f"model of type {hf_config.model_type} has {', '.join(wrong)}: expected full causal"
        " attention, no mixture of experts and a plain vocabulary projection, such as Llama, Qwen2"
        " and Qwen3 have"
    )
