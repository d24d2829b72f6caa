"""Options of a request: what is read, what is refused, and to which schedules a server switches."""

import pytest

from sparrow_sglang.request_options import RequestError, RequestOption
from sparrow_sglang.schedule import BudgetSchedule, ScheduleError

PAGE = 16


def schedule(name: str, *pages: int, **fields) -> BudgetSchedule:
    budgets = tuple(count * PAGE for count in pages)
    return BudgetSchedule(
        **{"name": name, "page_size": PAGE, "bin_tokens": 64, "budget_tokens": budgets} | fields
    )


INT4 = {"landmark_bits": 4}
A, B = schedule("a", 4, 5, 5, 7), schedule("b", 6, 6, 8)
PLACE = 'custom_params["sparrow"]'
REFUSED = [
    ({"dense": 1}, "['dense']=1: expected true or false"),
    ({"dense": True, "kv_budget_tokens": 64}, ": expected one of dense and kv_budget_tokens"),
    ({"schedule": "b"}, "['schedule']='b': expected none"),
    ({"kv_budget_tokens": 32}, "['kv_budget_tokens']=32: expected 48 tokens"),
    ({"kv_budget_tokens": 100}, "=100: expected a multiple of the page size, 16"),
    ({"kv_budget_tokens": True}, "=True: expected a whole number of tokens, a multiple of 16"),
    ({"kv_budget_tokens": 2**67}, "first and last pages, to 1073741824"),
    ({"kv_budget_tokens": "80"}, "='80': expected a whole number of tokens"),
    ({"budget": 80}, "['budget']=80: unknown: expected dense, kv_budget_tokens or rep"),
    ({"report": 1}, "['report']=1: expected true or false"),
    ({}, "={}: expected an object with one of dense, kv_budget_tokens or report"),
    ("dense", "='dense': expected an object"),
]


class TestReading:
    def test_none_is_the_default(self):
        for params in (None, {}, {"thinking_budget": 3}, {"sparrow": None}):
            assert RequestOption.read(params, A) == RequestOption(A)

    @pytest.mark.parametrize(("given", "problem"), REFUSED, ids=str)
    def test_each_rule_has_its_own_sentence(self, given, problem):
        with pytest.raises(RequestError) as error:
            RequestOption.read({"sparrow": given}, A)
        assert str(error.value).startswith(PLACE) and problem in str(error.value)

    @pytest.mark.parametrize("report", [True, False])
    def test_a_report_may_stand_beside_each(self, report):
        for rule, schedule, cap in [
            ({}, A, None),
            ({"dense": True}, None, None),
            ({"dense": False}, A, None),
            ({"kv_budget_tokens": 80}, A, 80),
        ]:
            option = RequestOption.read({"sparrow": rule | {"report": report}}, A)
            assert option == RequestOption(schedule, cap, report)


class TestSwitching:
    @pytest.mark.parametrize(
        ("other", "field"),
        [
            (schedule("b", 6, dense_layers=(0,)), "dense_layers"),
            (schedule("b", 6, sink_pages=2), "sink_pages"),
            (schedule("b", 6, recent_pages=1), "recent_pages"),
            (BudgetSchedule.fixed(512, 32), "page_size"),
            (schedule("b", 6, selection=INT4), "selection.landmark_bits"),
        ],
    )
    def test_what_would_move_landmarks_is_refused(self, other, field):
        with pytest.raises(ScheduleError, match=f"{other.name}: {field}=.*, as in the server's a"):
            other.require_switch_from(A)

    def test_dense_is_never_sparse(self):
        dense = schedule("first", 6, selection=INT4 | {"layer_weights": [9, 9, 0, 2]}).as_dense()
        assert dense.name == "dense" and dense.is_dense and not A.is_dense
        assert dense.tokens_read([1, 10**6]).tolist() == [1, 10**6]
