"""Wrong bodies to a live server's own routes: HTTP 400 in one short line, and nothing changes."""

import base64
import json
from itertools import count

import httpx
import pytest
import torch
from engines import random_prompt
from safetensors.torch import save

from sparrow_sglang.schedules.names import load_schedule
from sparrow_sglang.schedules.schedule import BudgetSchedule

SHIPPED = "smollm2-135m-0.86"
FIELDS = BudgetSchedule.fixed(96).model_dump(mode="json") | {"name": "mine"}
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
LONG = "x" * 1_000_000
MAX_MESSAGE = 900
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    "body",
    [
        b"",
        nested(100_000).encode(),
        f'{{"schedule": {nested(200)}}}'.encode(),
        b'{"schedule": NaN}',
        b'{"schedule": 1' + b"0" * 30 + b"}",
        json.dumps({"schedule": LONG}).encode(),
        b'{"schedule": "fixed-99999999999999999999"}',
        b'{"schedule": "/etc/passwd"}',
        b'{"schedule": "fixed-96", "other": 1}',
        b'{"schedule": "fixed-96", "timeout_s": "long"}',
    ],
    ids=count(),
)
def test_bodies(client: httpx.Client, body: bytes) -> None:
    response = client.post("/sparrow/schedule", content=body)
    assert response.status_code == 400, response.text[:300]
    message = response.json()["error"]["message"]
    assert message.isprintable() and len(message) < MAX_MESSAGE, message
    answer = client.get("/sparrow/schedule").json()
    assert (answer["schedule"]["name"], answer["warning"]) == ("fixed-64", None)


FACTORS = {
    f"{MODULE}.lora_A.weight": torch.zeros(4, 144),
    f"{MODULE}.lora_B.weight": torch.zeros(144, 4),
}
TENSORS = base64.b64encode(save(FACTORS)).decode()


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
