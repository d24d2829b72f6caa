"""Which models the policy computes rightly, and the engine can take over.

In: the config of a model. Out: what is not supported, in one line.
"""

from typing import Any

from sparrow_sglang.hf_config import FULL, config_value, text_config

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def unsupported(hf_config: Any, head_bias: bool = False) -> str | None:
    """Why a model with this Hugging Face config cannot be trained; None if it can.

    `head_bias` says whether its vocabulary projection has a bias.
    """
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
    wrong += ["a bias of the vocabulary projection"] if head_bias else []
    if not wrong:
        return None
    return (
        f"model of type {hf_config.model_type} has {', '.join(wrong)}: expected full causal"
        " attention, no mixture of experts and a plain vocabulary projection, such as Llama, Qwen2"
        " and Qwen3 have"
    )
