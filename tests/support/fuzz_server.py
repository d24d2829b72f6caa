"""Odd bodies for one live server: requests with options, and this package's own routes.

The server must answer each body as documented, or refuse it with status 400 in one line. The
expected answer follows from the documented rules and from what was sent before.
"""

import base64
import json
import random
import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import httpx
import torch
from adapted_models import RANK, words
from fuzz import MISSING, Change, cases, changed, complaint, damaged, odd_value
from fuzz_inputs import SCHEDULE, changed_option, is_option, is_portable, is_schedule
from safetensors.torch import load, save
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sparrow_sglang.schedule_names import known_schedules

FLOOR = 48
CONFIG = {"r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}
CONFIG_KEYS = [
    *CONFIG,
    *("peft_type", "use_dora", "use_rslora", "bias", "rank_pattern", "alpha_pattern"),
    *("modules_to_save", "lora_dropout", "base_model_name_or_path", "fan_in_fan_out"),
    *("layers_to_transform", "init_lora_weights", "task_type", "inference_mode", "revision"),
]

# Fields that make a request long, or wait for something that never comes, are left out.
REQUEST_FIELDS = sorted(
    {*GenerateReqInput.__dataclass_fields__} - {"stream", "background", "image_data", "audio_data"}
    - {"video_data", "http_worker_ipc"}
)  # fmt: skip
SAMPLING_FIELDS = sorted({*SamplingParams.__struct_fields__} - {"max_new_tokens"})
LONG = {"input_ids": [5] * 40, "rid": "long",
        "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}  # fmt: skip
GONE = {"model_path": "/gone"}
TAGS: list[Any] = [{}, {"tags": ["kv_cache"]}, {"tags": ["weights"]}, {"tags": ["nothing"]}]
CONTROL_CALLS: list[tuple[str, list[Any]]] = [
    ("/pause_generation", [{"mode": "abort"}, {"mode": "retract"}, {"mode": "in_place"}]),
    ("/continue_generation", [{}]),
    ("/release_memory_occupation", TAGS),
    ("/resume_memory_occupation", TAGS),
    ("/flush_cache?timeout=0.1", [{}]),
    ("/sparrow/schedule", [{"schedule": "fixed-96", "timeout_s": 0.2}]),
    (
        "/update_weights_from_disk",
        [{"model_path": "/gone"}, {"model_path": "/gone", "flush_cache": False}],
    ),
    ("/abort_request", [{"rid": "long"}, {"rid": ""}, {"abort_all": True}]),
    ("/load_lora_adapter", [{"lora_name": "x", "lora_path": "/gone"}]),
    ("/unload_lora_adapter", [{"lora_name": "x"}]),
]
RESTORING_CALLS: list[tuple[str, Any]] = [
    ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
    ("/resume_memory_occupation", {"tags": ["weights"]}),
    ("/resume_memory_occupation", {"tags": ["cuda_graph"]}),
    ("/continue_generation", {}),
    ("/abort_request", {"abort_all": True}),
]


class Live:
    """Sends the cases of a kind to the server one after the other.

    `adapter` is a safetensors file of factors that fit CONFIG.
    """

    def __init__(self, url: str, adapter: bytes) -> None:
        self.http = httpx.Client(base_url=url, timeout=120)
        self.adapter = adapter
        self.kinds: dict[str, Callable[[random.Random], str | None]] = {
            "request": self.request,
            "schedule_route": self.schedule_route,
            "adapter_route": self.adapter_route,
            "any_field": self.any_field,
            "control": self.control,
        }

    def problems(self, kind: str, seed: int, numbers: range) -> list[str]:
        """Problems found in these cases, a line each; stops if the server does not answer."""
        found = []
        for name, draw in cases(seed, kind, numbers):
            try:
                problem = self.kinds[kind](draw)
                if problem is None and draw.random() < 0.05:
                    problem = self._generate({}) or self._generate({"report": True})
            except httpx.TransportError as error:
                return [*found, f"{name}: no answer, {type(error).__name__}: {error}"]
            if problem is not None:
                found.append(f"{name}: {problem[:1500]}")
        return found

    def names(self) -> tuple[str, ...]:
        return tuple(self.http.get("/sparrow/schedule").json()["loaded"])

    def request(self, draw: random.Random) -> str | None:
        """A request with an option, over each of the routes."""
        option, changes = changed_option(draw)
        custom: Any = {"sparrow": option}
        if draw.random() < 0.1:
            custom["other"] = odd_value(draw)
        prompt = [draw.randrange(3, 250) for _ in range(draw.choice([1, 40, 100]))]
        route = draw.choice(["/generate", "/v1/completions", "/v1/chat/completions"])
        stream = draw.random() < 0.3
        if route == "/generate":
            parameters = {"max_new_tokens": 2, "ignore_eos": True, "custom_params": custom}
            body = {"input_ids": prompt, "sampling_params": parameters, "stream": stream}
        else:
            body = {"model": "tiny", "max_tokens": 2, "ignore_eos": True, "stream": stream}
            body["custom_params"] = custom
            body |= (
                {"prompt": prompt}
                if route == "/v1/completions"
                else {"messages": [{"role": "user", "content": words(prompt)}]}
            )
        answer = self._post(route, body)
        right = is_option(option, self.names(), FLOOR)
        if answer.status_code == 200:
            if not right:
                return f"{route} takes {option!r}"
            if '"error"' in answer.text:
                return f"{route}: {answer.text[:300]}"
            asked = bool(option) and option.get("report") is True
            if asked != ('"kv_tokens_read_mean"' in answer.text):
                return f"{route}: a report was {'' if asked else 'not '}asked for: {answer.text}"
            return None
        other = [Change("custom_params", v) for k, v in custom.items() if k == "other"]
        if not is_portable(body):
            # Refused by SGLang's parser, in words of its own.
            return (
                None if answer.status_code == 400 else f"{answer.status_code} {answer.text[:300]}"
            )
        if right and not other:
            return f"{route} refuses {option!r}: {answer.status_code} {answer.text[:300]}"
        return _refused(answer, changes + other)

    def any_field(self, draw: random.Random) -> str | None:
        """Odd values in any field of a request or its sampling parameters; the server goes on."""
        sampling, _ = changed(draw, {"max_new_tokens": 2, "ignore_eos": True}, SAMPLING_FIELDS)
        body = {"input_ids": [5] * 40, "sampling_params": sampling, "return_logprob": True}
        body, _ = changed(draw, body, REQUEST_FIELDS)
        parameters = body.get("sampling_params")
        if isinstance(parameters, dict) and not _is_short(parameters.get("max_new_tokens")):
            parameters["max_new_tokens"] = 2
        answer = self._post("/generate", body)
        if answer.status_code not in (200, 400):
            return f"{answer.status_code} {answer.text[:300]} to {json.dumps(body)[:600]}"
        return self._generate({})

    def control(self, draw: random.Random) -> str | None:
        """Control calls in any order, with a request under way or none; the server goes on."""
        calls = []
        request: Thread | None = None
        if draw.random() < 0.5:
            request = Thread(target=self._post, args=("/generate", LONG))
            request.start()
            time.sleep(draw.choice([0, 0.1]))
        for _ in range(draw.randint(1, 4)):
            route, bodies = draw.choice(CONTROL_CALLS)
            body = draw.choice(bodies)
            answer = self._post(route, body)
            calls.append(f"{route} {body}: {answer.status_code}")
            if answer.status_code not in (200, 400):
                return f"{'; '.join(calls)} {answer.text[:300]}"
        # Back to the state of the beginning, whatever it is now.
        for route, body in RESTORING_CALLS:
            self._post(route, body)
        if request is not None:
            request.join()
        problem = self._generate({})
        return problem and f"{problem} after {'; '.join(calls)}"

    def schedule_route(self, draw: random.Random) -> str | None:
        """A switch of the schedule."""
        names = self.names()
        given: Any
        if draw.random() < 0.3:
            given = draw.choice([*names, *known_schedules(), "fixed-128", "fixed-49", "fixed-0"])
            if draw.random() < 0.4:
                given = odd_value(draw)
            changes = [Change("schedule", given)]
            if isinstance(given, dict):
                changes += [Change(key, MISSING) for key in given]
        else:
            fields = SCHEDULE | {"name": draw.choice(["mine", "yours", "theirs"])}
            known = [*fields, "sink_pages", "recent_pages", "dense_layers", "calibrated", "model",
                     "tail_target", "model_match", "provenance"]  # fmt: skip
            given, changes = changed(draw, fields, known)
            changes += [
                Change(other, c.value) for c in changes for other in ("budget_tokens", "bin_tokens")
            ]
            changes += (
                [Change("bins", MISSING)] if isinstance(given.get("budget_tokens"), list) else []
            )
        body: Any = {"schedule": given}
        if draw.random() < 0.1:
            body, more = changed(draw, body, ["schedule"])
            changes += [*more, Change("body", MISSING), Change("schedule", given)]
            given = body.get("schedule")
        if given is None:
            # Without a schedule the form of the body is wrong; the error need only name the field.
            changes.append(Change("schedule", MISSING))
        content = json.dumps(body).encode()
        if draw.random() < 0.1:
            content, changes = damaged(draw, content), [Change("", MISSING)]
        if not is_portable(body):
            changes.append(Change("body", MISSING))
        if isinstance(given, dict):
            changes += [Change(key, MISSING) for key in SCHEDULE if key not in given]
        answer = self._post("/sparrow/schedule", content)
        if answer.status_code != 200:
            return _refused(answer, changes)
        taken = json.loads(content)["schedule"]
        now = self.http.get("/sparrow/schedule?full=true").json()["schedule"]
        if isinstance(taken, dict):
            if not is_schedule(taken) or len(taken["budget_tokens"]) > 1024:
                return f"takes {taken!r}"
            if now | taken != now:
                return f"holds {now} after {taken}"
        elif now["name"] != taken:
            return f"holds {now['name']} after {taken!r}"
        return self._generate({"report": True})

    def adapter_route(self, draw: random.Random) -> str | None:
        """Set an adapter; if the server takes it, a request uses it."""
        body: dict[str, Any] = {"name": "a", "config": CONFIG}
        weights, changes = self.adapter, []
        part = draw.choice(["config", "config", "tensors", "bytes", "body", "content"])
        if part == "config":
            body["config"], changes = changed(draw, CONFIG, CONFIG_KEYS)
        elif part == "tensors":
            weights, changes = _odd_tensors(draw, weights)
        elif part == "bytes":
            weights, changes = damaged(draw, weights), [Change("tensors", MISSING)]
        body["tensors"] = base64.b64encode(weights).decode()
        if part == "body":
            body, changes = changed(draw, body, ["name", "config", "tensors"])
            changes += [Change(key, MISSING) for key in ("body", "tensors") if changes]
            if isinstance(body.get("config"), dict):
                changes += [Change(key, MISSING) for key in ("r", "lora_alpha", "target_modules")]
        content = json.dumps(body).encode()
        if not is_portable(body):
            changes.append(Change("body", MISSING))
        if part == "content":
            content, changes = damaged(draw, content), [Change("", MISSING)]
        answer = self._post("/sparrow/adapter", content)
        if answer.status_code != 200:
            return _refused(answer, changes)
        return self._generate({}, json.loads(content)["name"])

    def _post(self, route: str, body: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"content-type": "application/json"}
        return self.http.post(route, content=content, headers=kind)

    def _generate(self, option: dict[str, Any], adapter: str | None = None) -> str | None:
        """What is wrong with the answer to a right request."""
        parameters: dict[str, Any] = {"max_new_tokens": 3, "ignore_eos": True}
        if option:
            parameters["custom_params"] = {"sparrow": option}
        body = {"input_ids": [5] * 120, "sampling_params": parameters, "lora_path": adapter}
        answer = self._post("/generate", body)
        if answer.status_code != 200:
            return f"a right request is refused: {answer.status_code} {answer.text[:300]}"
        count = answer.json()["meta_info"]["completion_tokens"]
        return None if count == 3 else f"a right request got {count} tokens of 3"


def _is_short(count: Any) -> bool:
    return not isinstance(count, (int, float)) or count <= 10 if count is not None else False


def _refused(answer: httpx.Response, changes: list[Change]) -> str | None:
    if answer.status_code != 400:
        return f"{answer.status_code} {answer.text[:300]}"
    content = answer.json()
    if not changes:
        return f"is refused: {answer.text[:300]}"
    message = content["error"]["message"] if "error" in content else content["message"]
    return complaint(message, changes)


def _odd_tensors(draw: random.Random, weights: bytes) -> tuple[bytes, list[Change]]:
    """LoRA factors, one of which has another shape, dtype, name or values, or is missing."""
    tensors = load(weights)
    key = draw.choice(sorted(tensors))
    value = tensors.pop(key)
    kind = draw.randrange(8)
    if kind == 0:
        value = value.to(draw.choice([torch.float16, torch.bfloat16, torch.float64, torch.int32]))
    elif kind == 1:
        value = torch.full_like(value, draw.choice([float("nan"), float("inf"), 1e38, 0.0]))
    elif kind == 2:
        value = value[..., : draw.randrange(value.shape[-1] + 1)].contiguous()
    elif kind == 3:
        value = value.reshape(draw.choice([(-1,), (1, *value.shape), tuple(value.shape[::-1])]))
    elif kind == 4:
        key = draw.choice([key + "x", "base_model." + key, key.replace(".0.", ".9."), "\n", ""])
    elif kind == 5:
        return save(tensors), [Change("tensors", MISSING)]
    elif kind == 6:
        return save({}), [Change("tensors", MISSING)]
    return save(tensors | {key: value}), [Change("tensors", MISSING)]
