"""Random inputs are read, or refused in one short line; a server goes on after each of them.

A case begins with a valid input and changes it in a place or two. SPARROW_FUZZ_CASES and
SPARROW_FUZZ_SEED say how many and which; `make fuzz` runs 100,000. Seed, kind and number name a
case, and always give the same one.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from adapted_models import save_model_of_words
from fuzz import cases, changed, damaged, odd_value
from servers import start_server
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams

from sparrow_sglang.errors import InputError
from sparrow_sglang.request_options import RequestError, RequestOption
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.schedule import BudgetSchedule, ScheduleError

CASES = int(os.environ.get("SPARROW_FUZZ_CASES", "1000"))
SEED = int(os.environ.get("SPARROW_FUZZ_SEED", "0"))
FIRST = int(os.environ.get("SPARROW_FUZZ_FIRST", "0"))
MAX_MESSAGE = 600
# Most cases go to the kinds that are cheap to test.
SHARES = {
    "schedule_file": 0.4,
    "run_configuration": 0.3,
    "request_option": 0.22,
    "any_field": 0.03,
}
SCHEDULE = {"name": "mine", "page_size": 16, "bin_tokens": 64, "budget_tokens": [64, 80, 112]}
FULL_SCHEDULE = SCHEDULE | {
    "sink_pages": 1,
    "recent_pages": 2,
    "dense_layers": [0, 1],
    "selection": {
        "landmark_tokens": 4,
        "landmark_bits": 4,
        "landmark_pairs": None,
        "group_score": "best_head",
        "layer_weights": [1.0, 1.0, 0.5, 1.5],
    },
    "calibrated": True,
    "model": "Qwen3-8B",
    "tail_target": 0.86,
    "model_match": {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096},
    "provenance": {"date": "today", "bins": [1, 2.5, None]},
}
ACTIVE = BudgetSchedule.fixed(64)
OPTIONS: list[dict[str, Any]] = [
    {"dense": True},
    {"dense": False, "report": True},
    {"kv_budget_tokens": 96, "report": False},
    {"kv_budget_tokens": 80},
    {"kv_budget_tokens": 48, "report": True},
]
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Fields that make a request long, or wait for something that never comes, are left out.
REQUEST_FIELDS = sorted(
    {*GenerateReqInput.__dataclass_fields__} - {"stream", "background", "image_data", "audio_data"}
    - {"video_data", "http_worker_ipc"}
)  # fmt: skip
SAMPLING_FIELDS = sorted({*SamplingParams.__struct_fields__} - {"max_new_tokens"})
SESSION_FIELDS = getattr(SessionParams, "__struct_fields__", ("id", "rid", "offset", "replace"))
CUSTOM = ("sampling_params", "custom_params")
FIELD_PATHS: list[tuple[str, ...]] = [
    *((name,) for name in REQUEST_FIELDS),
    *(("sampling_params", name) for name in SAMPLING_FIELDS),
    *(("session_params", name) for name in SESSION_FIELDS),
    *((*CUSTOM, name) for name in ("sparrow", "sparrow_audited", "sparrow_record", "other")),
    *((*CUSTOM, "sparrow", name) for name in ("dense", "kv_budget_tokens", "report")),
    *(("sampling_params", "logit_bias", name) for name in ("5", "-1", "a")),
    ("kv_hints", "a"),
    ("positional_embed_overrides", "embeds"),
]
JSON_VALUES: list[Any] = [
    *(None, True, 0, -1, 2**40, 1.5, "", "a", "0"),
    *([], [0], [-1], ["a"], [None], [[0]], [{}], {}, {"a": 0}, {"0": [1.5]}),
]


def complaint(message: str) -> str | None:
    """What is wrong with an error; None if nothing is."""
    short = message.isprintable() and len(message) <= MAX_MESSAGE
    return None if short else f"is not one short line: {message[:MAX_MESSAGE]!r}"


def schedule_file(draw: random.Random, folder: Path) -> str | None:
    fields = changed(
        draw, draw.choice([SCHEDULE, FULL_SCHEDULE]), list(BudgetSchedule.model_fields)
    )
    content = json.dumps(fields).encode()
    path = folder / "s.json"
    path.write_bytes(damaged(draw, content) if draw.random() < 0.15 else content)
    try:
        found = BudgetSchedule.from_json(path)
    except ScheduleError as error:
        return complaint(str(error).replace(str(folder), ""))
    found.save(folder / "again.json")
    again = BudgetSchedule.from_json(folder / "again.json")
    return None if again == found else "differs when it is saved and read again"


def run_configuration(draw: random.Random, folder: Path) -> str | None:
    fields = TrainConfig.model_fields
    sections = [name for name, info in fields.items() if hasattr(info.annotation, "model_fields")]
    run: dict[str, Any] = {"run_dir": "runs/a", "steps": 100, "task": {"name": "story"}}
    section = draw.choice(sections)
    kind: Any = fields[section].annotation
    run[section] = changed(draw, run.get(section, {}), list(kind.model_fields))
    fields_of_run = changed(draw, run, list(fields)) if draw.random() < 0.25 else run
    try:
        TrainConfig.parse(fields_of_run)
    except InputError as error:
        return complaint(str(error).replace(str(folder), ""))
    return None


def request_option(draw: random.Random, folder: Path) -> str | None:
    given = odd_option(draw)
    try:
        RequestOption.read({"sparrow": given}, ACTIVE)
    except RequestError as error:
        return complaint(str(error))
    return None


def odd_option(draw: random.Random) -> Any:
    known = ["dense", "kv_budget_tokens", "report"]
    return odd_value(draw) if draw.random() < 0.15 else changed(draw, draw.choice(OPTIONS), known)


def numbers(kind: str) -> range:
    return range(FIRST, FIRST + round(CASES * SHARES[kind]))


def require_none(kind: str, check: Callable[[random.Random], str | None]) -> None:
    """Run the cases of a kind, and fail on their problems."""
    found = []
    for name, draw in cases(SEED, kind, numbers(kind)):
        try:
            problem = check(draw)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            found.append(f"{name}: {problem[:1500]}")
    assert not found, "\n".join([f"{len(found)} cases", *found[:40]])


@pytest.mark.parametrize("read", [schedule_file, run_configuration, request_option])
def test_files_and_options(read: Callable[..., str | None], tmp_path: Path) -> None:
    require_none(read.__name__, lambda draw: read(draw, tmp_path))


class Live:
    """A server that gets odd bodies."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=120)

    def any_field(self, draw: random.Random) -> str | None:
        """Values of each JSON type in each field of a request, also of those inside others."""
        body: dict[str, Any] = {"input_ids": [5] * 40, "return_logprob": True}
        body["sampling_params"] = {"max_new_tokens": 2, "ignore_eos": True}
        for _ in range(draw.choice([1, 1, 2])):
            *parents, name = draw.choice(FIELD_PATHS)
            place = body
            for parent in parents:
                inside = place.get(parent)
                place[parent] = place = inside if isinstance(inside, dict) else {}
            place[name] = draw.choice(JSON_VALUES) if draw.random() < 0.7 else odd_value(draw)
        parameters = body.get("sampling_params")
        if isinstance(parameters, dict) and not _is_short(parameters.get("max_new_tokens")):
            parameters["max_new_tokens"] = 2
        answer = self._post("/generate", body)
        if answer.status_code not in (200, 400):
            return f"{answer.status_code} {answer.text[:300]} to {json.dumps(body)[:600]}"
        return self.serves()

    @contextmanager
    def others(self) -> Iterator[list[str]]:
        """Two clients generate within this context; what is wrong with their answers."""
        problems: list[str] = []
        is_over = Event()

        def generate() -> None:
            sampling = {"max_new_tokens": 40, "ignore_eos": True}
            while not is_over.is_set():
                answer = self._post(
                    "/generate", {"input_ids": [7] * 90, "sampling_params": sampling}
                )
                if answer.status_code != 200:
                    problems.append(answer.text[:300])
                elif answer.json()["meta_info"]["completion_tokens"] != 40:
                    problems.append(str(answer.json()["meta_info"]))

        threads = [Thread(target=generate) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield problems
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def serves(self) -> str | None:
        """What is wrong with the answer to a right request."""
        parameters = {"max_new_tokens": 3, "ignore_eos": True}
        body = {"input_ids": [5] * 120, "sampling_params": parameters}
        answer = self._post("/generate", body)
        if answer.status_code != 200:
            return f"a right request is refused: {answer.status_code} {answer.text[:300]}"
        count = answer.json()["meta_info"]["completion_tokens"]
        return None if count == 3 else f"a right request got {count} tokens of 3"

    def _post(self, route: str, body: Any) -> httpx.Response:
        kind = {"content-type": "application/json"}
        return self.http.post(route, content=json.dumps(body).encode(), headers=kind)


def _is_short(count: Any) -> bool:
    return not isinstance(count, (int, float)) or count <= 10 if count is not None else False


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = save_model_of_words(tmp_path_factory.mktemp("words"))
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise the server closes idle connections, perhaps when a request is under way.
        patch.setenv("SGLANG_TIMEOUT_KEEP_ALIVE", "3600")
        with start_server(
            model,
            skip_tokenizer_init=False,
            grammar_backend="none",
            attention_backend="sparrow",
            sparrow_schedule="fixed-64",
            served_model_name="tiny",
            enable_lora=True,
            max_lora_rank=8,
            lora_target_modules=list(MODULES),
            max_loras_per_batch=2,
            lora_backend="torch_native",
            sparrow_audit_rate=1.0,
            # At lower levels the server logs each bad request.
            log_level="critical",
        ) as url:
            yield Live(url)


def test_a_live_server(live: Live) -> None:
    with live.others() as problems:
        require_none("any_field", live.any_field)
    assert problems == []
    assert live.http.get("/health_generate").status_code == 200
