"""Options of a request: what is read, and what is refused."""

import pytest

from sparrow_sglang.schedules.options import RequestError, RequestOption
from sparrow_sglang.schedules.schedule import BudgetSchedule

A = BudgetSchedule(name="a", page_size=16, bin_tokens=64, budget_tokens=(64, 80, 80, 112))
FIELD = 'custom_params["sparrow"]'
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


def test_no_option_is_the_default():
    for params in (None, {}, {"thinking_budget": 3, 1: 2}, {"sparrow": None}, "sparow", 5):
        assert RequestOption.read(params, A) == RequestOption(A)


@pytest.mark.parametrize("key", ["sparow", "Sparrow", "sparrows", "sparrow "])
def test_a_misspelt_option_is_refused(key):
    with pytest.raises(RequestError, match=f"custom_params\\['{key}'\\]: did you mean 'sparrow'"):
        RequestOption.read({key: {"dense": True}}, A)


@pytest.mark.parametrize(("option", "problem"), REFUSED, ids=str)
def test_each_rule_has_its_own_sentence(option, problem):
    with pytest.raises(RequestError) as error:
        RequestOption.read({"sparrow": option}, A)
    assert str(error.value).startswith(FIELD) and problem in str(error.value)


@pytest.mark.parametrize("report", [True, False])
def test_a_report_may_stand_beside_each(report):
    for rule, schedule, cap in [
        ({}, A, None),
        ({"dense": True}, None, None),
        ({"dense": False}, A, None),
        ({"kv_budget_tokens": 80}, A, 80),
    ]:
        option = RequestOption.read({"sparrow": rule | {"report": report}}, A)
        assert option == RequestOption(schedule, cap, report)
