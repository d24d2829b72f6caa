"""Budget schedules: the arithmetic against a loop, the shipped files, and every refusal."""

import itertools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract import budget_pages, tokens_read
from hypothesis import given
from hypothesis import strategies as st

from sparrow_sglang.attention_backends.budget_table import BudgetTable
from sparrow_sglang.schedules.names import (
    known_schedules,
    load_schedule,
    schedule_for_model,
    schedule_spec,
)
from sparrow_sglang.schedules.options import RequestOption
from sparrow_sglang.schedules.schedule import PAGE_SIZES, RULES, BudgetSchedule, ScheduleError

VALID: dict[str, Any] = {
    "name": "mine",
    "page_size": 16,
    "bin_tokens": 64,
    "budget_tokens": [48, 64, 64, 128],
}


@st.composite
def schedules(draw: st.DrawFn) -> BudgetSchedule:
    page = draw(st.sampled_from(PAGE_SIZES))
    sinks = draw(st.integers(0, 3))
    recent = draw(st.integers(1, 3))
    steps = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    pages = [sinks + recent + sum(steps[: i + 1]) for i in range(len(steps))]
    return BudgetSchedule(
        name="drawn",
        page_size=page,
        bin_tokens=page * draw(st.integers(1, 12)),
        budget_tokens=tuple(count * page for count in pages),
        sink_pages=sinks,
        recent_pages=recent,
        dense_tokens=page * draw(st.integers(0, 20)),
        selection=draw(st.sampled_from(RULES)),
    )


EXTRA_PAGES = st.none() | st.integers(0, 9)


def cap_of(schedule: BudgetSchedule, extra_pages: int | None) -> int | None:
    """A request's budget in tokens, of so many pages more than the least."""
    if extra_pages is None:
        return None
    return (schedule.least_pages + extra_pages) * schedule.page_size


def edge_lengths(schedule: BudgetSchedule) -> list[int]:
    """One token either side of every page edge and bin edge, to two bins past the last one."""
    end = schedule.bin_tokens * (len(schedule.budget_tokens) + 2)
    edges = set(range(0, end + 1, schedule.page_size)) | set(range(0, end + 1, schedule.bin_tokens))
    return sorted({edge + side for edge in edges for side in (-1, 0, 1) if edge + side > 0})


@given(schedules(), EXTRA_PAGES)
def test_answers_equal_the_loop_at_every_edge(schedule: BudgetSchedule, extra: int | None) -> None:
    lengths, cap = edge_lengths(schedule), cap_of(schedule, extra)
    expected = [tokens_read(schedule, n, cap) for n in lengths]
    assert schedule.tokens_read(lengths, cap).tolist() == expected
    assert [schedule.tokens_read(n, cap) for n in lengths] == expected
    for n in lengths:
        pages = budget_pages(n, schedule.page_size, schedule.bin_tokens, [*schedule.budget_tokens])
        assert schedule.budget_at(n) == pages * schedule.page_size


@given(schedules(), EXTRA_PAGES)
def test_first_sparse_length_is_the_first_at_which_a_page_is_left_out(
    schedule: BudgetSchedule, extra: int | None
) -> None:
    cap = cap_of(schedule, extra)
    first = next(n for n in itertools.count(1) if tokens_read(schedule, n, cap) < n)
    assert RequestOption(schedule, cap).first_sparse_length() == first


@given(schedules())
def test_save_and_load_give_back_an_equal_schedule(schedule: BudgetSchedule) -> None:
    # Not tmp_path: Hypothesis would share it between examples.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.json"
        schedule.save(path)
        assert BudgetSchedule.from_json(path) == schedule
        assert [entry.name for entry in Path(folder).iterdir()] == ["drawn.json"]


def test_the_device_counts_pages_as_the_schedule_does_for_every_cap() -> None:
    first = BudgetSchedule(**VALID)
    dense_below = BudgetSchedule(**VALID | {"name": "below", "dense_tokens": 160})
    budgets = BudgetTable(first, 4, "cpu")
    pages = torch.arange(1, 60, dtype=torch.int32)
    for schedule in (first, dense_below, first.as_fixed(96), first.as_dense()):
        schedule.require_switch_from(first)
        budgets.load(schedule)
        options = [(schedule, None), (schedule, 80), (None, None), (schedule, 48)]
        budgets.set_options(range(4), [RequestOption(*each) for each in options])
        for row, (asked, cap) in enumerate(options):
            counted = budgets.num_selected(pages, torch.full_like(pages, row))
            expected = pages if asked is None else schedule.pages_read(pages.numpy(), cap)
            assert counted.dtype == pages.dtype
            assert counted.tolist() == expected.tolist()


# -- the shipped files


TARGETS = ("0.75", "0.86", "0.92")


def test_the_twenty_published_schedules_and_the_embedded_models_ship() -> None:
    names = known_schedules()
    assert len([name for name in names if name.startswith("qwen3-")]) == 20
    models = ("smollm2-135m", "qwen2.5-coder-1.5b")
    rules = [f"{model}{rule}" for model in models for rule in ("", "-int4")]
    assert set(names) > {f"{rule}-{target}" for rule in rules for target in TARGETS}
    assert set(names) > {f"gemma3-270m-{target}" for target in ("0.75", "0.86")}


@pytest.mark.parametrize("name", known_schedules())
def test_shipped_file_loads_and_says_where_it_is_from(name: str) -> None:
    schedule = load_schedule(name, 16)
    assert schedule.name == name
    measured_here = schedule.provenance.keys() >= {"command", "commit", "device", "bins"}
    assert schedule.model and schedule.model_match
    assert measured_here or schedule.provenance["source"]
    assert schedule.sink_pages == 1 and schedule.recent_pages == 2
    int4 = "-int4-" in name
    assert schedule.selection == ("int4" if int4 else "published")
    assert schedule.dense_layers == (() if int4 else (0, 1))
    assert schedule.calibrated and name.endswith(f"-{schedule.tail_target:.2f}")


# Top-k pages as the release prints them; three pages are reserved beside them.
PUBLISHED_TOPK_PAGES = [
    ("qwen3-1.7b-0.75", 0, 29),
    ("qwen3-1.7b-0.94", 19, 765),
    ("qwen3-4b-0.86", 7, 221),
    ("qwen3-4b-0.92", 19, 1149),
    ("qwen3-8b-0.87", 4, 157),
    ("qwen3-14b-0.86", 19, 893),
]


@pytest.mark.parametrize(("name", "bin_index", "topk_pages"), PUBLISHED_TOPK_PAGES)
def test_budgets_are_the_published_ones(name: str, bin_index: int, topk_pages: int) -> None:
    assert load_schedule(name, 16).budget_pages[bin_index] == topk_pages + 3


# -- choosing one


QWEN3_4B = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "num_hidden_layers": 36}
SMOLLM2 = {"architectures": ["LlamaForCausalLM"], "hidden_size": 576, "num_hidden_layers": 30}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 640,
    "num_hidden_layers": 18,
    "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)],
}
CODER = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "max_position_embeddings": 32768,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "qwen3-4b-0.86"),
        ({"hidden_size": 2048, "num_hidden_layers": 28}, "qwen3-1.7b-0.86"),
        ({"hidden_size": 4096}, "qwen3-8b-0.86"),
        ({"hidden_size": 5120, "num_hidden_layers": 40}, "qwen3-14b-0.86"),
        (SMOLLM2, "smollm2-135m-int4-0.86"),
        (GEMMA3, "gemma3-270m-0.86"),
        (CODER, "qwen2.5-coder-1.5b-int4-0.86"),
    ],
)
def test_the_schedule_is_found_from_the_model(change: dict[str, Any], expected: str) -> None:
    config = QWEN3_4B | change
    assert schedule_for_model(config, 16).name == expected
    assert schedule_for_model(SimpleNamespace(**config), 16).name == expected


def test_a_schedule_says_which_model_it_was_calibrated_for() -> None:
    shipped = load_schedule("qwen3-8b-0.86", 16)
    for config, expected in [
        (QWEN3_4B | {"hidden_size": 4096}, "calibrated"),
        (QWEN3_4B, "calibrated for Qwen3-8B, not for this model"),
        (SMOLLM2, "calibrated for Qwen3-8B, not for this model"),
    ]:
        assert shipped.describe_calibration(config) == expected
        assert shipped.describe_calibration(SimpleNamespace(**config)) == expected
    # DeepSeek-R1-Distill-Qwen-1.5B has this shape, too.
    distilled = CODER | {"max_position_embeddings": 131072}
    assert not load_schedule("qwen2.5-coder-1.5b-0.86", 16).matches(distilled)
    fields = shipped.model_dump() | {"model_match": None}
    thin = BudgetSchedule(
        **fields | {"provenance": {"bins": [{"basis": "measured", "tokens": 46}]}}
    )
    assert "thin" in thin.describe_calibration(QWEN3_4B)
    assert BudgetSchedule.fixed(512).describe_calibration(QWEN3_4B) == "NOT calibrated"


@pytest.mark.parametrize(
    "field", [{"provenance": {"seconds": float("nan")}}, {"model": "\ud800"}], ids=str
)
def test_evidence_that_answers_cannot_carry_is_refused(field: dict[str, Any]) -> None:
    """NaN differs from itself, so that ranks would seem to hold different schedules."""
    with pytest.raises(ScheduleError, match="provenance"):
        BudgetSchedule(**BudgetSchedule.fixed(64).model_dump() | field)


def test_a_model_whose_schedule_has_another_page_size_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"qwen3-4b-0\.86.*page_size=16.*32.*--page-size 16"):
        schedule_for_model(QWEN3_4B, 32)


@pytest.mark.parametrize(
    ("spec", "page_size", "message"),
    [
        *((spec, 16, "fixed-<tokens>") for spec in ("", "4096", "fixed-", "fixed-4k", "fixed--16")),
        ("fixed-100", 16, "budget_tokens"),
        ("fixed-512", 20, "page_size"),
        ("drafts", 48, "page_size"),
    ],
)
def test_schedules_without_a_file_are_checked_too(spec: str, page_size: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        load_schedule(spec, page_size)


def test_the_flag_comes_before_the_variable_and_this_before_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARROW_SCHEDULE", "from-variable")
    assert schedule_spec("from-flag", "auto") == "from-flag"
    assert schedule_spec(None, "auto") == "from-variable"
    monkeypatch.setenv("SPARROW_SCHEDULE", "")
    assert schedule_spec(None, "auto") == "auto"
    monkeypatch.delenv("SPARROW_SCHEDULE")
    assert schedule_spec(None, "auto") == "auto"


# -- own files


def write(folder: Path, content: Any) -> str:
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_an_own_file_is_loaded_by_path_with_the_defaults(tmp_path: Path) -> None:
    schedule = load_schedule(write(tmp_path, VALID), 16)
    assert schedule.budget_tokens == (48, 64, 64, 128)
    assert (schedule.sink_pages, schedule.recent_pages, schedule.dense_layers) == (1, 2, (0, 1))
    assert not schedule.calibrated and schedule.model is None
    assert schedule.selection == "published"


REFUSED_FIELDS = [
    {"budget_tokens": [64, 48]},
    {"budget_tokens": [48, 50]},
    {"sink_pages": 4},
    {"budget_tokens": 512},
    {"budget_tokens": [48, True]},
    {"page_size": 20},
    {"bin_tokens": 100},
    {"recent_pages": 0},
    {"sink_pages": -1},
    {"dense_layers": [0, -1]},
    {"tail_target": 1.5},
    {"name": ""},
    {"name": "dense"},
    {"dense_tokens": 100},
    {"dense_tokens": -16},
    {"model_match": {"hidden_size": 1.5}},
    {"budget_token": [48]},
    {"selection": "int8"},
]


@pytest.mark.parametrize("change", REFUSED_FIELDS)
def test_a_bad_field_is_refused_naming_file_field_value_and_allowed(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path, message = write(tmp_path, VALID | change), "budget_tokens|" + next(iter(change))
    with pytest.raises(ScheduleError, match=message) as caught:
        load_schedule(path, 16)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    with pytest.raises(ScheduleError, match=message):
        BudgetSchedule(**VALID | change)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("dense_layers", {"dense_layers": (0,)}),
        ("sink_pages", {"sink_pages": 2, "budget_tokens": (64,)}),
        ("recent_pages", {"recent_pages": 1}),
        ("page_size", {"page_size": 32, "budget_tokens": (512,)}),
        ("selection", {"selection": "int4"}),
    ],
)
def test_a_switch_that_would_move_landmarks_is_refused(field: str, changes: dict[str, Any]) -> None:
    other = BudgetSchedule(**VALID | {"name": "other"} | changes)
    with pytest.raises(ScheduleError, match=f"other: {field}=.*, as in the server's mine"):
        other.require_switch_from(BudgetSchedule(**VALID))


def test_the_dense_schedule_reads_everything() -> None:
    dense = BudgetSchedule(**VALID).as_dense()
    assert dense.name == "dense" and dense.is_dense and not BudgetSchedule(**VALID).is_dense
    assert dense.tokens_read([1, 10**6]).tolist() == [1, 10**6]


def test_layers_with_windows_or_linear_attention_count_as_dense() -> None:
    """SGLang's config says only that every n-th layer has full attention."""
    kinds = ("linear_attention", "sliding_attention")
    listed = [{"layer_types": ([kind] * 2 + ["full_attention"]) * 2} for kind in kinds]
    for config in (*listed, {"full_attention_interval": 3}):
        served = BudgetSchedule.fixed(64).for_model({"num_hidden_layers": 6} | config)
        assert served.dense_layers == (0, 1, 3, 4)


@pytest.mark.parametrize(
    ("dense_layers", "problem"),
    [
        ((0, 1, 2), None),
        ((28, 29), "the model has 4 layers, 0 to 3"),
        ((0, 1, 2, 3), "no layer of the model would be sparse"),
    ],
)
def test_dense_layers_are_compared_with_the_model(
    dense_layers: tuple[int, ...], problem: str | None
) -> None:
    fields = BudgetSchedule.fixed(64).model_dump() | {"dense_layers": dense_layers}
    schedule = BudgetSchedule(**fields)
    config = {"num_hidden_layers": 4}
    if problem is None:
        assert schedule.for_model(config) == schedule
        return
    with pytest.raises(ScheduleError) as error:
        schedule.for_model(config)
    assert f"fixed-64: dense_layers={list(dense_layers)}: {problem}" in str(error.value)
