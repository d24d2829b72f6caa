"""Options of a request: what is read, what is refused, and which schedules load together."""

import pytest

from sparrow_sglang.loaded_schedules import MAX_LOADED, LoadedSchedules
from sparrow_sglang.request_options import RequestError, RequestOption
from sparrow_sglang.schedule import BudgetSchedule, ScheduleError

PAGE = 16


def schedule(name: str, *pages: int, **fields) -> BudgetSchedule:
    budgets = tuple(count * PAGE for count in pages)
    return BudgetSchedule(
        **{"name": name, "page_size": PAGE, "bin_tokens": 64, "budget_tokens": budgets} | fields
    )


INT4 = {"landmark_tokens": 4, "landmark_bits": 4, "group_score": "best_head"}
A, B = schedule("a", 4, 5, 5, 7), schedule("b", 6, 6, 8)
LOADED = LoadedSchedules.of([A, B])
PLACE = 'custom_params["sparrow"]'
LOADED_NAMES = "expected one of a, b, which are loaded"
REFUSED = [
    ({"dense": 1}, "['dense']=1: expected true or false"),
    ({"dense": True, "schedule": "b"}, ": expected one of dense and schedule"),
    ({"schedule": "c"}, f"['schedule']='c': {LOADED_NAMES}"),
    (
        {"schedule": "qwen3-8b-0.86"},
        f"shipped, but not loaded: {LOADED_NAMES}; start it with --sparrow-schedule a,b,qwen3-8b",
    ),
    (
        {"schedule": "smollm2-135m-int4-0.86"},
        f"shipped, but not loaded: {LOADED_NAMES}; schedule smollm2-135m-int4-0.86: dense_layers=[]"
        " differs from that of a: expected [0, 1] or more; serve it with a server of its own",
    ),
    ({"schedule": ["b"]}, f"['schedule']=['b']: {LOADED_NAMES}"),
    ({"kv_budget_tokens": 32}, "['kv_budget_tokens']=32: expected 48 tokens"),
    ({"kv_budget_tokens": 100}, "=100: expected a multiple of the page size, 16"),
    ({"kv_budget_tokens": True}, "=True: expected a whole number of tokens, a multiple of 16"),
    ({"kv_budget_tokens": 2**67}, "first and last pages, to 1073741824"),
    ({"kv_budget_tokens": "80"}, "='80': expected a whole number of tokens"),
    ({"budget": 80}, "['budget']=80: unknown: expected dense, schedule, kv_budget_tokens or rep"),
    ({"report": 1}, "['report']=1: expected true or false"),
    ({}, "={}: expected an object with one of dense, schedule, kv_budget_tokens or report"),
    ("dense", "='dense': expected an object"),
]


class TestReading:
    def test_none_is_the_default(self):
        for params in (None, {}, {"thinking_budget": 3}, {"sparrow": None}):
            assert RequestOption.read(params, LOADED) == RequestOption(A)

    @pytest.mark.parametrize(("given", "problem"), REFUSED, ids=str)
    def test_each_rule_has_its_own_sentence(self, given, problem):
        with pytest.raises(RequestError) as error:
            RequestOption.read({"sparrow": given}, LOADED)
        assert str(error.value).startswith(PLACE) and problem in str(error.value)

    @pytest.mark.parametrize("report", [True, False])
    def test_a_report_may_stand_beside_each(self, report):
        for rule, schedule, cap in [
            ({}, A, None),
            ({"dense": True}, None, None),
            ({"dense": False}, A, None),
            ({"schedule": "b"}, B, None),
            ({"kv_budget_tokens": 80}, A, 80),
        ]:
            option = RequestOption.read({"sparrow": rule | {"report": report}}, LOADED)
            assert option == RequestOption(schedule, cap, report)

    def test_first_sparse_length(self):
        # a: four pages until four are held, then five; the sixth is left out, from token 81 on.
        lengths = [
            (RequestOption(A), 81),
            (RequestOption(None), None),
            (RequestOption(B), 97),
            (RequestOption(A, kv_budget_tokens=48), 49),
            (RequestOption(A, kv_budget_tokens=640), 81),
        ]
        for option, length in lengths:
            assert option.first_sparse_length() == length, option


class TestLoading:
    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (schedule("b", 6, dense_layers=(0,)), r"b: dense_layers=\[0\] differs .* \[0, 1\]"),
            (schedule("b", 6, sink_pages=2), "b: sink_pages=2 differs .* expected 1"),
            (schedule("b", 6, recent_pages=1), "b: recent_pages=1 differs"),
            (BudgetSchedule.fixed(512, 32), "fixed-512: page_size=32 differs"),
            (schedule("a", 6), "'a' is named twice"),
            (schedule("b", 6, selection=INT4), "b: selection.landmark_tokens=4 differs"),
            (schedule("b", *[6] * 1025), "1025 bins: expected at most 1024"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, other, message):
        with pytest.raises(ScheduleError, match=message):
            LoadedSchedules.of([A, other])

    def test_layer_weights_may_differ_but_not_in_number(self):
        even, uneven, longer = (
            schedule(name, 6, selection=INT4 | {"layer_weights": weights})
            for name, weights in [("e", [1] * 4), ("u", [1, 1, 0.5, 1.5]), ("l", [1] * 5)]
        )
        plain = schedule("p", 6, selection=INT4)
        loaded = LoadedSchedules.of([plain, even])
        assert loaded.weighted_layers == 4
        assert loaded.with_active(uneven).active == uneven
        assert loaded.with_active(plain).weighted_layers == 4
        # The tables have a column for each layer, even while no schedule has weights.
        alone = LoadedSchedules.of([even]).with_active(plain)
        assert alone.with_active(even).active == even
        with pytest.raises(ScheduleError, match="l: .*has 5 numbers: expected 4, as others have;"):
            loaded.with_active(longer)
        with pytest.raises(ScheduleError, match="u: .*numbers: expected null, as others have none"):
            LoadedSchedules.of([plain]).with_active(uneven)

    def test_more_layers_may_be_dense_where_tables_tell_layers_apart(self):
        even = schedule("e", 6, selection=INT4 | {"layer_weights": [1] * 4})
        more, fewer = (
            schedule("d", 6, selection=INT4, dense_layers=layers) for layers in [(0, 1, 3), (0,)]
        )
        loaded = LoadedSchedules.of([even]).with_active(more)
        assert loaded.with_active(even).active == even
        with pytest.raises(ScheduleError, match=r"=\[0\] differs .* e: expected \[0, 1\] or more;"):
            loaded.with_active(fewer)
        with pytest.raises(ScheduleError, match=r"\[0, 1, 3\] differs .* a: expected \[0, 1\];"):
            LoadedSchedules.of([schedule("a", 6, selection=INT4)]).with_active(more)

    def test_too_many(self):
        with pytest.raises(ScheduleError, match="expected at most 14"):
            LoadedSchedules.of([schedule(str(i), 6) for i in range(MAX_LOADED + 1)])
