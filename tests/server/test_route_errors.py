"""Wrong bodies to a live server's own routes: HTTP 400 in one short line, and nothing changes."""

import base64
import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest
import torch
from engines import random_prompt
from safetensors.torch import save
from servers import start_server

from sparrow_sglang.schedule import BudgetSchedule
from sparrow_sglang.schedule_names import load_schedule

SHIPPED = "smollm2-135m-0.86"
FIELDS = BudgetSchedule.fixed(96).model_dump(mode="json") | {"name": "mine"}
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
LONG = "x" * 1_000_000
MAX_MESSAGE = 900
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def client(sharp_llama: str) -> Iterator[httpx.Client]:
    with (
        start_server(
            sharp_llama,
            attention_backend="sparrow",
            sparrow_schedule="fixed-64",
            enable_lora=True,
            max_lora_rank=4,
            lora_target_modules=["q_proj"],
            enable_metrics=True,
        ) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def refused(response: httpx.Response) -> str:
    """The reason that a refusal gives in one line."""
    assert response.status_code == 400, response.text[:300]
    message: str = response.json()["error"]["message"]
    assert message.isprintable() and len(message) < MAX_MESSAGE, message
    return message


def require_unchanged(client: httpx.Client) -> None:
    answer = client.get("/sparrow/schedule").json()
    assert (answer["schedule"]["name"], answer["loaded"]) == ("fixed-64", ["fixed-64"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"self": 1}, "unknown key 'self'"),
        ({"name": LONG}, "name='xxx.* expected a string of 1 to 64 letters, digits"),
        ({"name": "a\n[2026] forged"}, r"name='a\\n\[2026\] forged' is not allowed"),
        ({"name": SHIPPED}, f"name='{SHIPPED}': the shipped schedule .*expected another name"),
        ({"budget_tokens": [2**62]}, r"budget_tokens\[0\]=461168.* at most 1073741824"),
        ({"budget_tokens": [96] * 100_000}, "100000 bins: expected at most 1024"),
        ({"dense_layers": [0, 2**62]}, r"dense_layers\[1\]=4611686018427387904"),
        ({"dense_layers": list(range(100_000))}, r"dense_layers=.*: the model has 4 layers"),
        ({"model": "\ud800"}, r"'\\ud800' is no Unicode"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else next(iter(value))[:20],
)
def test_fields_of_a_schedule(client: httpx.Client, change: dict[str, Any], reason: str) -> None:
    response = client.post("/sparrow/schedule", content=json.dumps({"schedule": FIELDS | change}))
    assert_matches(reason, refused(response))
    require_unchanged(client)


def assert_matches(reason: str, message: str) -> None:
    with pytest.raises(ValueError, match=reason):
        raise ValueError(message)


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "expected a JSON object"),
        (nested(100_000).encode(), "expected a JSON object"),
        (f'{{"schedule": {nested(200)}}}'.encode(), "nested more than 64 deep"),
        (b'{"schedule": NaN}', "nan is no JSON number"),
        (b'{"schedule": 1' + b"0" * 30 + b"}", "expected whole numbers of 64 bits"),
        (json.dumps({"schedule": LONG}).encode(), "schedule='xxx.* is not known to this server"),
        (b'{"schedule": "fixed-99999999999999999999"}', "expected at most fixed-1073741824"),
        (b'{"schedule": "/etc/passwd"}', "'/etc/passwd' is not known to this server"),
    ],
    ids=count(),
)
def test_bodies(client: httpx.Client, body: bytes, reason: str) -> None:
    assert_matches(reason, refused(client.post("/sparrow/schedule", content=body)))
    require_unchanged(client)


def safetensors_of(dtype: str, num_bytes: int) -> str:
    """A file of one tensor of two elements in base64; safetensors does not write all it reads."""
    tensor = {"dtype": dtype, "shape": [2], "data_offsets": [0, num_bytes]}
    header = json.dumps({f"{MODULE}.lora_A.weight": tensor}).encode()
    content = len(header).to_bytes(8, "little") + header + b"\0" * num_bytes
    return base64.b64encode(content).decode()


def factors(rank: int = 4) -> dict[str, torch.Tensor]:
    return {
        f"{MODULE}.lora_A.weight": torch.zeros(rank, 144),
        f"{MODULE}.lora_B.weight": torch.zeros(144, rank),
    }


TENSORS = base64.b64encode(save(factors())).decode()
LONG_KEY = base64.b64encode(save({LONG: torch.zeros(1)})).decode()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tensors": safetensors_of("F4", 1)}, "tensors cannot be read .'F4'.*of BF16 or F32"),
        ({"tensors": "é"}, "tensors cannot be read .*: expected a safetensors file in base64"),
        ({"tensors": LONG_KEY}, r"tensors\['xxx.* belongs to no linear module"),
        ({"name": "a\nb"}, r"name='a\\nb': expected a string"),
        ({"config": LONG}, "config is a str: expected the fields"),
        ({"config": CONFIG | {"r": LONG}}, "config: r='xxx.* from 1 on"),
        ({"config": CONFIG | {"lora_alpha": LONG}}, "config: lora_alpha='xxx.*expected a number"),
        ({"config": CONFIG | {"lora_alpha": float("nan")}}, "nan is no JSON number"),
        ({"config": CONFIG | {"target_modules": 5}}, "target_modules=5: expected a list of str"),
        ({"config": CONFIG | {"target_modules": [LONG]}}, r"'xxx.* has room for rank 4"),
    ],
    ids=count(),
)
def test_adapters(client: httpx.Client, change: dict[str, Any], reason: str) -> None:
    body = {"name": "mine", "config": CONFIG, "tensors": TENSORS} | change
    response = client.post("/sparrow/adapter", content=json.dumps(body))
    assert_matches(reason, refused(response))


@pytest.mark.parametrize("option", [{"schedule": LONG}, {LONG: 1}, LONG])
def test_options_of_a_request(client: httpx.Client, option: Any) -> None:
    body = {
        "input_ids": random_prompt(0, 20),
        "sampling_params": {"max_new_tokens": 1, "custom_params": {"sparrow": option}},
    }
    message = refused(client.post("/generate", json=body))
    assert message.startswith('custom_params["sparrow"]') and "expected" in message


def test_what_is_right_is_taken(client: httpx.Client) -> None:
    """Right bodies work after all the wrong ones; a server takes back what it has given."""
    name = "A" + "b" * 62 + "9"
    for fields in (
        FIELDS | {"name": name, "provenance": {"é": [1, 2.5, None, True, {"deep": [[]]}]}},
        load_schedule(SHIPPED, 16).model_dump(mode="json"),
    ):
        assert client.post("/sparrow/schedule", json={"schedule": fields}).status_code == 200
        summary = client.get("/sparrow/schedule").json()["schedule"]
        assert summary == {key: fields[key] for key in fields if key != "provenance"}
        answer = client.get("/sparrow/schedule?full=true").json()
        assert answer["schedule"] == fields
        again = client.post("/sparrow/schedule", json={"schedule": answer["schedule"]})
        assert again.status_code == 200
    assert client.post("/sparrow/schedule", json={"schedule": "fixed-64"}).status_code == 200
    body = {"name": "org/my-adapter_1.0", "config": CONFIG, "tensors": TENSORS}
    assert client.post("/sparrow/adapter", json=body).json() == {"name": body["name"]}
    answered = client.post(
        "/generate",
        json={
            "input_ids": random_prompt(0, 80),
            "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
            "lora_path": body["name"],
        },
    )
    assert answered.json()["meta_info"]["completion_tokens"] == 4


def test_the_load_is_exported_without_an_audit(client: httpx.Client) -> None:
    metrics = client.get("/metrics/").text
    assert "\nsparrow:kv_tokens_cached" in metrics and "\nsparrow:kv_tokens_read" in metrics
    assert 'outcome="audited"' not in metrics
