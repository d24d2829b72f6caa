"""--engine-args, checked before an engine starts."""

import json
from typing import Any

import pytest

from sparrow_sglang.plugin.arguments.server_args import engine_arguments


@pytest.mark.parametrize("value", ["4k", True, [1]])
@pytest.mark.parametrize("name", ["context_length", "max_total_tokens", "sparrow_audit_rate"])
def test_a_number_must_be_one(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        engine_arguments(json.dumps({name: value}))
    assert engine_arguments(f'{{"{name}": null}}') == {name: None}


def test_a_name_must_be_known_and_a_field_of_ours_is() -> None:
    with pytest.raises(ValueError, match="tp_sise is no argument of SGLang: .*'tp_size'"):
        engine_arguments('{"tp_sise": 2}')
    assert engine_arguments('{"sparrow_audit_rate": 1}') == {"sparrow_audit_rate": 1}
