"""An SGLang of any version that decodes past the backend stops: no silent dense decode."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from engines import ON_CPU, import_for_fork, random_prompt, sparse
from servers import start_server

SECONDS = 120.0
pytestmark = ON_CPU


def computes_elsewhere(monkeypatch: pytest.MonkeyPatch, backends: dict[str, Any]) -> None:
    """Steps are planned by the backend, and layers computed by another."""
    from sparrow_sglang.attention_backends.backend import SparrowAttnBackend

    forward = SparrowAttnBackend.forward

    def past_it(
        backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **more: Any
    ) -> Any:
        if batch.forward_mode.is_decode():
            return backend.dense.forward_decode(q, k, v, layer, batch, *args, **more)
        return forward(backend, q, k, v, layer, batch, *args, **more)

    monkeypatch.setattr(SparrowAttnBackend, "forward", past_it)


def builds_another(monkeypatch: pytest.MonkeyPatch, backends: dict[str, Any]) -> None:
    monkeypatch.setitem(backends, "sparrow", backends["torch_native"])


@pytest.mark.parametrize(
    ("bypass", "message"),
    [(computes_elsewhere, "'sparrow' compute"), (builds_another, "TorchNativeAttnBackend")],
)
def test_dense_decode_is_refused(
    sharp_llama: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    bypass: Callable[..., None],
    message: str,
) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    import_for_fork()
    bypass(monkeypatch, ATTENTION_BACKENDS)
    # Start a server, as SGLang ends the whole process when a scheduler fails, even at start-up.
    with pytest.raises((httpx.TransportError, RuntimeError)):
        with start_server(sharp_llama, **sparse("fixed-64")) as url:
            body = {"input_ids": random_prompt(0, 100), "sampling_params": {"max_new_tokens": 8}}
            httpx.post(f"{url}/generate", json=body, timeout=SECONDS)
    assert message in capfd.readouterr().err
