"""--engine-args, checked before an engine starts."""

from dataclasses import fields

import pytest

from sparrow_sglang.plugin.server_args import argument_names, engine_arguments


def test_arguments_of_sglang_and_ours_are_taken_as_they_are() -> None:
    text = '{"tp_size": 2, "sparrow_audit_rate": 0.1, "lora_paths": {"a": "b"}}'
    expected = {"tp_size": 2, "sparrow_audit_rate": 0.1, "lora_paths": {"a": "b"}}
    assert engine_arguments(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"--engine-args \[\]: expected a JSON object"),
        ("{tp_size: 2}", "expected a JSON object"),
        (
            '{"tp_size": 2, "contxt_length": 9}',
            "--engine-args: contxt_length is no argument of SGLang: did you mean 'context_length'",
        ),
        ('{"zzzzzz": 1}', "zzzzzz is no argument of SGLang: expected a field of its ServerArgs"),
    ],
)
def test_anything_else_is_named_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as problem:
        engine_arguments(text)
    assert "\n" not in str(problem.value)


def test_the_arguments_of_an_engine_are_known_without_importing_it() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    names = getattr(ServerArgs, "__struct_fields__", None) or [f.name for f in fields(ServerArgs)]
    assert argument_names() == set(names)
