"""--engine-args, checked before an engine starts."""

from dataclasses import fields

from sparrow_sglang.plugin.server_args import argument_names, engine_arguments


def test_arguments_of_sglang_and_ours_are_taken_as_they_are() -> None:
    text = '{"tp_size": 2, "sparrow_audit_rate": 0.1, "lora_paths": {"a": "b"}}'
    expected = {"tp_size": 2, "sparrow_audit_rate": 0.1, "lora_paths": {"a": "b"}}
    assert engine_arguments(text) == expected


def test_the_arguments_of_an_engine_are_known_without_importing_it() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    names = getattr(ServerArgs, "__struct_fields__", None) or [f.name for f in fields(ServerArgs)]
    assert argument_names() == set(names)
