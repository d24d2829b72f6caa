"""Random inputs are read, or refused in one short line; a server goes on after each of them. A case
begins with a valid input and changes it in a place or two. SPARROW_FUZZ_CASES and SPARROW_FUZZ_SEED
say how many and which; `make fuzz` runs 100,000."""

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from servers import running_requests
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams
from waiting import wait_until

from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.schedules.options import RequestError, RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule, ScheduleError

CASES = int(os.environ.get("SPARROW_FUZZ_CASES", "1000"))
SEED = int(os.environ.get("SPARROW_FUZZ_SEED", "0"))
MAX_MESSAGE = 600
SCHEDULE = {"name": "mine", "page_size": 16, "bin_tokens": 64, "budget_tokens": [64, 80, 112]}
FULL_SCHEDULE = SCHEDULE | {
    "sink_pages": 1,
    "recent_pages": 2,
    "dense_layers": [0, 1],
    "selection": "int4",
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
    *((*CUSTOM, name) for name in ("sparrow", "sparrow_record", "sparrow_compare", "other")),
    *((*CUSTOM, "sparrow", name) for name in ("dense", "kv_budget_tokens", "report")),
    *(("sampling_params", "logit_bias", name) for name in ("5", "-1", "a")),
    ("kv_hints", "a"),
    ("positional_embed_overrides", "embeds"),
]
JSON_VALUES: list[Any] = [
    *(None, True, 0, -1, 2**40, 1.5, "", "a", "0"),
    *([], [0], [-1], ["a"], [None], [[0]], [{}], {}, {"a": 0}, {"0": [1.5]}),
]


# JSON values, changed fields and damaged files.
_EDGES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 15, 16, 17, 47, 48, 49, 64, 100, 1024, 10**6),
    *(2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, 10**30, -(2**63), -(2**70)),
    *(0.0, -0.0, 0.5, 1.0, 16.0, 1.5, -0.5, 1e-320, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "0", "16", "true", "null", "dense", "auto", "fixed-64", "fixed-96", "none"),
    *("qwen3-8b-0.86", "\n", "a\nb: error", "\x00", "\x1b[31mred", "\u202eabc", "é😀", "\ud800"),
    *("%s%n{}{0}", "../../etc/passwd", "a,b", "a:b", "self", "x" * 65, "y" * 2000, "z" * 100_000),
    *([None] * 1100, [1] * 1100),
]
_KEYS = ["self", "cls", "fields", "schema", "copy", "model_config", "__class__", "__init__", ""]
_BOMBS = [piece * 50_000 for piece in (b"[", b'{"a":', b"9", b"-", b"1e", b"\\u", b"[[", b"a = [")]

odd_values = st.recursive(
    st.sampled_from(_EDGES)
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(st.characters(), max_size=300),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*_KEYS, "a", "report", "dense", "x\ny"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@st.composite
def changed(draw: st.DrawFn, fields: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """A copy of `fields` with up to two of them removed, misnamed or given another value, or one of
    the names `known` added."""
    result = copy.deepcopy(dict(fields))
    for _ in range(draw(st.integers(0, 2))):
        kind, name = draw(st.integers(0, 9)), draw(st.sampled_from(known))
        if kind == 9 and result:
            del result[draw(st.sampled_from(sorted(result)))]
        elif kind == 8:
            names = [*_KEYS, name + "s", name[:-1], name.upper(), "a\nb", "k" * 3000]
            result[draw(st.sampled_from(names))] = draw(st.sampled_from([1, "x", None]))
        else:
            result[name] = draw(odd_values)
    return result


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with a few of its bytes replaced by others."""
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.sampled_from([start, start + 1, start + 20, len(content)]))
        inserted = draw(st.binary(max_size=4) | st.sampled_from([b"\xef\xbb\xbf", *_BOMBS]))
        content = content[:start] + inserted + content[end:]
    return content


def fuzz(share: float, *inputs: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """Runs a test on `inputs`; most cases go to the tests that are cheap."""
    cases = settings(max_examples=max(1, round(CASES * share)), deadline=None, database=None)
    return lambda test: seed(SEED)(cases(given(*inputs)(test)))


def require_one_short_line(error: Exception) -> None:
    message = str(error)
    assert message.isprintable() and len(message) <= MAX_MESSAGE


SCHEDULES = st.sampled_from([SCHEDULE, FULL_SCHEDULE]).flatmap(
    lambda fields: changed(fields, list(BudgetSchedule.model_fields))
)
FILES = SCHEDULES.map(lambda fields: json.dumps(fields).encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedules")


@fuzz(0.4, FILES | FILES | FILES | FILES.flatmap(damaged))
def test_schedule_files(folder: Path, content: bytes) -> None:
    path, again = folder / "s.json", folder / "again.json"
    path.write_bytes(content)
    try:
        found = BudgetSchedule.from_json(path)
    except ScheduleError as error:
        require_one_short_line(ScheduleError(str(error).replace(str(folder), "")))
    else:
        found.save(again)
        assert BudgetSchedule.from_json(again) == found


FIELDS = TrainConfig.model_fields
RUN: dict[str, Any] = {"run_dir": "runs/a", "steps": 100, "task": {"name": "story"}}
SECTIONS = {
    name: changed(RUN.get(name, {}), list(kind.model_fields))
    for name, info in FIELDS.items()
    if hasattr(kind := info.annotation, "model_fields")
}
RUNS = st.sampled_from([*SECTIONS]).flatmap(
    lambda name: SECTIONS[name].map(lambda section: RUN | {name: section})
)


@fuzz(0.3, RUNS | RUNS | RUNS | changed(RUN, list(FIELDS)))
def test_run_configurations(fields: dict[str, Any]) -> None:
    try:
        TrainConfig.parse(fields)
    except InputError as error:
        require_one_short_line(error)


@fuzz(
    0.22,
    odd_values
    | st.sampled_from(OPTIONS).flatmap(
        lambda option: changed(option, ["dense", "kv_budget_tokens", "report"])
    ),
)
def test_request_options(option: Any) -> None:
    try:
        RequestOption.read({"sparrow": option}, ACTIVE)
    except RequestError as error:
        require_one_short_line(error)


class Live:
    """A server that gets odd bodies."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def require_answer(self, changes: list[tuple[tuple[str, ...], Any]]) -> None:
        """Values of each JSON type in each field of a request, also of those inside others."""
        body: dict[str, Any] = {"input_ids": [5] * 40, "return_logprob": True}
        body["sampling_params"] = {"max_new_tokens": 2, "ignore_eos": True}
        for (*parents, name), value in changes:
            place = body
            for parent in parents:
                inside = place.get(parent)
                place[parent] = place = inside if isinstance(inside, dict) else {}
            place[name] = value
        parameters = body.get("sampling_params")
        if isinstance(parameters, dict) and not _is_short(parameters.get("max_new_tokens")):
            parameters["max_new_tokens"] = 2
        answer = self._post("/generate", body)
        assert answer.status_code in (200, 400), answer.text[:300]
        # It goes on to answer right requests.
        parameters = {"max_new_tokens": 3, "ignore_eos": True}
        answer = self._post("/generate", {"input_ids": [5] * 120, "sampling_params": parameters})
        assert answer.json()["meta_info"]["completion_tokens"] == 3

    @contextmanager
    def others(self) -> Iterator[list[str]]:
        """Two clients generate within this context, and one leaves its streams; what is wrong with
        the answers of the two."""
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

        def leave() -> None:
            sampling = {"max_new_tokens": 2000, "ignore_eos": True}
            body = {"input_ids": [9] * 60, "sampling_params": sampling, "stream": True}
            while not is_over.is_set():
                with self.http.stream("POST", "/generate", json=body) as answer:
                    next(answer.iter_lines())

        threads = [Thread(target=each) for each in (generate, generate, leave)]
        for thread in threads:
            thread.start()
        try:
            yield problems
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def _post(self, route: str, body: Any) -> httpx.Response:
        kind = {"content-type": "application/json"}
        return self.http.post(route, content=json.dumps(body).encode(), headers=kind)


def _is_short(count: Any) -> bool:
    return not isinstance(count, (int, float)) or count <= 10 if count is not None else False


def test_a_live_server(client: httpx.Client) -> None:
    live = Live(client)
    values = st.sampled_from(JSON_VALUES) | odd_values
    changes = st.lists(st.tuples(st.sampled_from(FIELD_PATHS), values), min_size=1, max_size=2)
    with live.others() as problems:
        fuzz(0.03, changes)(live.require_answer)()
    assert problems == []
    assert client.get("/health_generate").status_code == 200
    wait_until(lambda: not running_requests(client))
    endpoint = connect(str(client.base_url))
    assert endpoint.call_sparrow("landmarks")["pages"] > 0
    # Refused as long as any request holds KV.
    endpoint.flush_cache()
    assert client.get("/v1/loads").json()["loads"][0]["num_used_tokens"] == 0
