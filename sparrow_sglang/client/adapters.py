"""Push a LoRA adapter to a running engine or server.

In: an `sglang.Engine` or a server's base URL, and an adapter: PEFT's folder, or its tensors and
config. Over HTTP this is POST /sparrow/adapter.
"""

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow_sglang.client.endpoint import connect

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def push_adapter(
    target: Any,
    name: str,
    adapter: "Mapping[str, torch.Tensor] | str | os.PathLike[str]",
    config: Mapping[str, Any] | None = None,
    *,
    api_key: str | None = None,
) -> None:
    """Load a LoRA adapter, in place of the loaded one of that name if there is one.

    The server holds new requests back and waits for the running ones; then it empties the prefix
    cache. Requests use the adapter by its name: `lora_path` of `Engine.generate` and of /generate,
    `model="<served model>:<name>"` in the OpenAI routes. The server must be started with
    --enable-lora, --max-lora-rank and --lora-target-modules.

    Args:
        target: an `sglang.Engine` or a server's base URL.
        name: the name that requests use.
        adapter: a folder on this machine as PEFT's `save_pretrained` writes it; or lora_A [r, in]
            and lora_B [out, r] of each module, floating-point, under PEFT's names.
        config: the fields of adapter_config.json; needed with tensors, not allowed with a folder.
        api_key: the server's --admin-api-key, or else --api-key, if it has one.

    Raises:
        ValueError: the folder cannot be read, or `config` is missing or given beside a folder.
        EndpointError: the server refused, for the reason that the message gives, or is gone. An
            adapter that does not fit the server is refused before the former one is touched.
    """
    from safetensors.torch import save

    if isinstance(adapter, Mapping):
        if config is None:
            raise ValueError(f"config=None: expected the fields of {CONFIG_FILE} beside tensors")
        # Copies, because safetensors refuses tensors that share memory.
        copies = {key: value.detach().contiguous().clone() for key, value in adapter.items()}
        fields, weights = _as_json(config), save(copies)
    else:
        if config is not None:
            raise ValueError(f"config is given beside a folder, which has its own {CONFIG_FILE}")
        fields, weights = _read(Path(adapter))
    connect(target, api_key).call_sparrow(
        "adapter", name=name, config=fields, tensors=base64.b64encode(weights).decode("ascii")
    )


def _as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as PEFT writes it to JSON; its config in memory holds sets."""
    try:
        fields: dict[str, Any] = json.loads(json.dumps(dict(config), default=sorted))
    except (TypeError, ValueError) as error:
        raise ValueError(f"config cannot be sent ({error}): expected JSON values") from None
    return fields


def _read(folder: Path) -> tuple[dict[str, Any], bytes]:
    try:
        fields = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        weights = (folder / WEIGHTS_FILE).read_bytes()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"adapter={str(folder)!r} cannot be read ({error}): expected a folder with"
            f" {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT's save_pretrained writes them"
        ) from None
    if not isinstance(fields, dict):
        raise ValueError(f"{folder / CONFIG_FILE}: expected a JSON object")
    return fields, weights
