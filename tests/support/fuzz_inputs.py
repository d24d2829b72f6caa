"""Fuzz cases without a server: schedule files, run configurations, request options."""

import json
import math
import random
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fuzz import MISSING, Change, cases, changed, complaint, damaged, odd_value, outcome

from sparrow_sglang.errors import InputError
from sparrow_sglang.loaded_schedules import LoadedSchedules
from sparrow_sglang.request_options import RequestError, RequestOption
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.schedule import BudgetSchedule, ScheduleError
from sparrow_sglang.selection import SelectionRule

SCHEDULE = {"name": "mine", "page_size": 16, "bin_tokens": 64, "budget_tokens": [64, 80, 112]}
FULL_SCHEDULE = SCHEDULE | {
    "sink_pages": 1,
    "recent_pages": 2,
    "dense_layers": [0, 1],
    "selection": {
        "landmark_tokens": 4,
        "landmark_bits": 4,
        "landmark_pairs": 24,
        "group_score": "best_head",
        "layer_weights": [1.0, 1.0, 0.5, 1.5],
    },
    "calibrated": True,
    "model": "Qwen3-8B",
    "tail_target": 0.86,
    "model_match": {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096},
    "provenance": {"date": "today", "bins": [1, 2.5, None]},
}
LOADED = LoadedSchedules.of(
    [BudgetSchedule.fixed(64), BudgetSchedule.fixed(96), BudgetSchedule(**SCHEDULE)]
)
OPTIONS: list[dict[str, Any]] = [
    {"dense": True},
    {"dense": False, "report": True},
    {"schedule": "mine"},
    {"schedule": "fixed-96", "report": False},
    {"kv_budget_tokens": 80},
    {"kv_budget_tokens": 48, "report": True},
    {"report": True},
]
RUN: dict[str, Any] = {"run_dir": "runs/a", "steps": 100, "task": {"name": "story"}}


def schedule_file(draw: random.Random, folder: Path) -> str | None:
    """A schedule file must give a schedule with the file's values, or a one-line error."""
    fields, changes = changed(
        draw, draw.choice([SCHEDULE, FULL_SCHEDULE]), list(BudgetSchedule.model_fields)
    )
    content = json.dumps(fields).encode()
    broken = draw.random() < 0.15
    if broken:
        content = damaged(draw, content)
    path = folder / "s.json"
    path.write_bytes(content)
    found, message = outcome(lambda: BudgetSchedule.from_json(path), ScheduleError)
    if message is not None:
        said = message.replace(str(folder), "")
        if broken:
            return complaint(said, [Change("s.json", MISSING)])
        if is_schedule(fields):
            return f"a right schedule is refused: {message}"
        return complaint(said, [*changes, *_with_names(changes)])
    if broken:
        fields = json.loads(content)
    if not is_schedule(fields):
        return "a wrong schedule is taken"
    return _schedule_problem(found, fields, folder)


def _with_names(changes: list[Change]) -> list[Change]:
    """An error about two fields together may name the field that was not changed."""
    return [Change(field, c.value) for c in changes for field in ("bin_tokens", "budget_tokens")]


def _schedule_problem(found: BudgetSchedule, fields: Mapping[str, Any], folder: Path) -> str | None:
    given = json.loads(json.dumps(fields))
    # A selection rule is saved with all its fields, or left out if it is the published one.
    rule = SelectionRule(**given.pop("selection", {}))
    if rule != SelectionRule():
        given["selection"] = rule.model_dump(mode="json")
    if (got := found.model_dump(mode="json")) | given != got:
        return f"read as {got}"
    page, bins = found.page_size, fields["budget_tokens"]
    for length in (1, page, fields["bin_tokens"], 5 * fields["bin_tokens"] + 1, 10**6):
        pages = math.ceil(length / page)
        budget = bins[min(pages * page // fields["bin_tokens"], len(bins) - 1)]
        if found.kv_budget_tokens(length) != budget:
            return f"reads {found.kv_budget_tokens(length)} at {length} and not {budget}"
    found.save(folder / "again.json")
    if BudgetSchedule.from_json(folder / "again.json") != found:
        return "differs when it is saved and read again"
    return None


def is_schedule(fields: Any) -> bool:
    """Whether the documented rules of a schedule hold."""
    rules: dict[str, Callable[[Any], bool]] = {
        "name": lambda v: (
            isinstance(v, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", v) is not None
        ),
        "page_size": lambda v: v in (16, 32, 64),
        "bin_tokens": lambda v: _count(v, 1),
        "budget_tokens": lambda v: isinstance(v, list) and v != [] and all(map(_count, v)),
        "sink_pages": lambda v: _count(v, 0),
        "recent_pages": lambda v: _count(v, 1),
        "dense_layers": lambda v: (
            isinstance(v, list) and all(_count(x, 0) for x in v) and len(set(v)) == len(v)
        ),
        "selection": lambda v: isinstance(v, dict),
        "calibrated": lambda v: isinstance(v, bool),
        "model": lambda v: v is None or isinstance(v, str),
        "tail_target": lambda v: v is None or (_number(v) and 0 < v <= 1),
        "model_match": lambda v: (
            v is None or (isinstance(v, dict) and all(map(_field, v.values())))
        ),
        "provenance": lambda v: isinstance(v, dict),
    }
    if not isinstance(fields, dict) or not set(fields) <= set(rules):
        return False
    if not all(is_portable(fields.get(key)) for key in ("model", "model_match", "provenance")):
        return False
    if not set(SCHEDULE) <= set(fields) or not all(rules[k](v) for k, v in fields.items()):
        return False
    page, budgets = fields["page_size"], fields["budget_tokens"]
    floor = (fields.get("sink_pages", 1) + fields.get("recent_pages", 2)) * page
    whole = all(tokens % page == 0 for tokens in [*budgets, fields["bin_tokens"]])
    dense = fields.get("dense_layers", [0, 1])
    if not _is_selection(fields.get("selection", {}), page, dense):
        return False
    return whole and budgets == sorted(budgets) and budgets[0] >= floor


def _are_pairs(lists: Any) -> bool:
    """Whether these are ascending indices by layer and KV head, all lists equally long."""
    layers = lists if isinstance(lists, list) else []
    heads = [head for layer in layers for head in (layer if isinstance(layer, list) else [None])]
    whole = all(isinstance(h, list) and all(_whole(v, 0) and v < 1024 for v in h) for h in heads)
    if not heads or not whole or len({len(layer) for layer in layers}) > 1:
        return False
    sizes = {len(head) for head in heads}
    return len(sizes) == 1 and 0 not in sizes and all(h == sorted(set(h)) for h in heads)


def _is_selection(fields: dict[str, Any], page: int, dense: list[int]) -> bool:
    rules: dict[str, Callable[[Any], bool]] = {
        "landmark_tokens": lambda v: v is None or (_whole(v, 1) and page % v == 0),
        "landmark_bits": lambda v: v in (16, 4),
        "landmark_pairs": lambda v: v is None or (_whole(v, 1) and v <= 1024) or _are_pairs(v),
        "group_score": lambda v: v in ("mean_query", "best_head"),
        "layer_weights": lambda v: (
            v is None or (isinstance(v, list) and all(_number(x) and x >= 0 for x in v))
        ),
    }
    if not set(fields) <= set(rules) or not all(rules[k](v) for k, v in fields.items()):
        return False
    weights = fields.get("layer_weights")
    if weights is None:
        return True
    sparse = [weight for layer, weight in enumerate(weights) if layer not in dense]
    return bool(sparse) and abs(sum(sparse) / len(sparse) - 1) <= 1e-3


def _whole(value: Any, least: int | None = None) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and (least is None or value >= least)


def _count(value: Any, least: int | None = None) -> bool:
    """Whether a value is a count that fits into a device table of 32-bit integers."""
    return _whole(value, least) and value <= 2**30


def is_portable(value: Any) -> bool:
    """Whether other readers of JSON, and messages between processes, can carry it."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except ValueError:
        return False
    numbers = re.findall(r"-?[0-9]+(?![0-9.e])", re.sub(r'"(\\.|[^"\\])*"', "", text))
    return all(-(2**63) <= int(number) < 2**63 for number in numbers)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _field(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(part, str) for part in value)
    return _whole(value) or isinstance(value, str)


def run_configuration(draw: random.Random, folder: Path) -> str | None:
    """A TOML file of `sparrow train` must give its own values, or a one-line error."""
    fields, changes = _changed_run(draw)
    content = toml(fields)
    broken = draw.random() < 0.1
    if broken:
        content = damaged(draw, content)
    path = folder / "r.toml"
    path.write_bytes(content)
    found, message = outcome(lambda: TrainConfig.load(path), InputError)
    try:
        readable = tomllib.loads(content.decode())
    except (ValueError, RecursionError):
        readable = None
    if message is not None:
        said = message.replace(str(folder), "")
        if broken or readable is None:
            return complaint(said, [Change("r.toml", MISSING)])
        return complaint(said, [_in_toml(change) for change in changes])
    return _run_problem(found.model_dump(mode="json"), readable or {}, "")


def _changed_run(draw: random.Random) -> tuple[dict[str, Any], list[Change]]:
    known = TrainConfig.model_fields
    sections = [name for name, info in known.items() if hasattr(info.annotation, "model_fields")]
    defaults = TrainConfig.parse(RUN).model_dump(mode="json")
    run = dict(RUN)
    for name in draw.sample(sections, draw.randrange(3)):
        values = {key: value for key, value in defaults[name].items() if value is not None}
        kept = draw.sample(sorted(values), draw.randint(0, len(values)))
        run[name] = {key: values[key] for key in kept} | dict(RUN.get(name, {}))
    if draw.random() < 0.25:
        return changed(draw, run, list(known))
    section = draw.choice(sections)
    kind: Any = known[section].annotation
    run[section], changes = changed(draw, run.get(section, {}), list(kind.model_fields))
    return run, changes


def _run_problem(got: Any, given: Any, place: str) -> str | None:
    """The place where a configuration differs from the file, as a message; None if nowhere."""
    if place in (".engine.server_args", ".task.options"):
        return None
    if isinstance(given, list) and isinstance(got, list) and len(given) == len(got):
        parts = zip(got, given, strict=True)
        return next(filter(None, (_run_problem(*pair, f"{place}[]") for pair in parts)), None)
    if isinstance(given, dict) and isinstance(got, dict):
        for key, value in given.items():
            if problem := _run_problem(got.get(key), value, f"{place}.{key}"):
                return problem
        return None
    same = got == given or (isinstance(got, str) and Path(got) == Path(str(given)))
    if isinstance(got, float) and type(given) is int:
        same, given = got == float(given), float(given)
    return None if same and type(got) is type(given) else f"{place[1:]} is {got!r}, not {given!r}"


def toml(fields: Mapping[str, Any]) -> bytes:
    """TOML of JSON values; None, which TOML does not have, is left out."""
    lines = [
        f"{_toml(key)} = {_toml(value)}\n" for key, value in fields.items() if value is not None
    ]
    return "".join(lines).encode("utf-8", "surrogatepass")


def _in_toml(change: Change) -> Change:
    """A change as the TOML file shows it: values of None, and tables, count as MISSING."""
    value = _without_none(change.value)
    return Change(change.field, MISSING if value is None or isinstance(value, dict) else value)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(part) for part in value if part is not None]
    return value


def _toml(value: Any) -> str:
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return re.sub(r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", text)
    if isinstance(value, Mapping):
        pairs = [f"{_toml(k)} = {_toml(v)}" for k, v in value.items() if v is not None]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(part) for part in value if part is not None) + "]"
    return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


def request_option(draw: random.Random, folder: Path) -> str | None:
    """`custom_params` as the server reads them."""
    given, changes = changed_option(draw)
    found, message = outcome(lambda: RequestOption.read({"sparrow": given}, LOADED), RequestError)
    right = is_option(given, LOADED.names, 48)
    if message is not None:
        return f"is refused: {message}" if right else complaint(message, [*changes])
    if not right:
        return f"{given!r} is read as {found}"
    asked = given or {}
    schedule = LOADED.get(asked["schedule"]) if "schedule" in asked else LOADED.active
    expected = RequestOption(
        None if asked.get("dense") else schedule,
        asked.get("kv_budget_tokens"),
        asked.get("report", False),
    )
    return None if found == expected else f"{given!r} is read as {found}"


def changed_option(draw: random.Random) -> tuple[Any, list[Change]]:
    """The value of "sparrow" in `custom_params`."""
    if draw.random() < 0.15:
        given = odd_value(draw)
    else:
        known = ["dense", "schedule", "kv_budget_tokens", "report"]
        given, _ = changed(draw, draw.choice(OPTIONS), known)
    return given, [Change('custom_params["sparrow"]', given)]


def is_option(given: Any, names: tuple[str, ...], floor: int) -> bool:
    """Whether the documented rules of a request's option hold, at a page size of 16."""
    if given is None:
        return True
    rules: dict[str, Callable[[Any], bool]] = {
        "dense": lambda v: isinstance(v, bool),
        "schedule": lambda v: isinstance(v, str) and v in names,
        "kv_budget_tokens": lambda v: _count(v, floor) and v % 16 == 0,
        "report": lambda v: isinstance(v, bool),
    }
    if not isinstance(given, dict) or not given or not set(given) <= set(rules):
        return False
    return len(set(given) - {"report"}) <= 1 and all(rules[k](v) for k, v in given.items())


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {
    "schedule_file": schedule_file,
    "run_configuration": run_configuration,
    "request_option": request_option,
}


def problems(kind: str, seed: int, numbers: range, folder: Path) -> list[str]:
    """Problems found in these cases, a line each."""
    found = []
    for name, draw in cases(seed, kind, numbers):
        try:
            problem = KINDS[kind](draw, folder)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            found.append(f"{name}: {problem[:1500]}")
    return found
