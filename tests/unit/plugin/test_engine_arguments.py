"""--engine-args, checked before an engine starts."""

import json
from dataclasses import fields
from typing import Any

import pytest

from sparrow_sglang.plugin.arguments.server_args import engine_argument_types, engine_arguments


@pytest.mark.parametrize("value", ["4k", True, [1]])
@pytest.mark.parametrize("name", ["context_length", "max_total_tokens", "sparrow_audit_rate"])
def test_a_number_must_be_one(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        engine_arguments(json.dumps({name: value}))
    assert engine_arguments(f'{{"{name}": null}}') == {name: None}


def test_the_arguments_of_an_engine_are_known_without_importing_it() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    names = getattr(ServerArgs, "__struct_fields__", None) or [f.name for f in fields(ServerArgs)]
    assert engine_argument_types().keys() == set(names)
