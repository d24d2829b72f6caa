"""Checks of a server's command line that can be made before SGLang is imported.

In: the flags after `sparrow serve`. Out: nothing, or one error. SGLang's own parser checks the rest
some ten seconds later.
"""

import errno
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

from sparrow_sglang.config import AUTO
from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import relative_note
from sparrow_sglang.models import path_problem
from sparrow_sglang.plugin.refusals import BACKEND
from sparrow_sglang.plugin.server_args import argument_names
from sparrow_sglang.schedule import PAGE_SIZES, ScheduleError
from sparrow_sglang.schedule_names import load_schedule
from sparrow_sglang.validation import nearest_first

MODEL_FLAGS = ("--model-path", "--model")
_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", "30000"
_DEFAULT_PAGE_SIZE = "16"
# Flags of SGLang's separate package that serves gRPC, if it is installed.
_OF_GRPC = ("--metrics-host", "--metrics-port", "--servicer-impl")


ALL_FLAGS = "sparrow serve --help-all lists the flags"


def check_flags(argv: Sequence[str]) -> None:
    """Check names of flags, the model's folder, schedules and the file of --config.

    Raises `InputError`, or `ScheduleError` for a schedule.
    """
    for word in argv:
        flag = word.partition("=")[0]
        # argparse accepts the beginning of a flag for the flag.
        if flag.startswith("--") and not any(known.startswith(flag) for known in known_flags()):
            raise InputError(unknown_flags(word, known_flags()))
    config = _value(argv, "--config")
    if config is not None and not Path(config).exists():
        raise InputError(
            f"--config: Config file not found: {config}{relative_note(config)}; expected a YAML"
            " file of flags"
        )
    first = argv[0] if argv and not argv[0].startswith("-") else None
    model = _value(argv, *MODEL_FLAGS) or first
    if model is not None and (problem := path_problem(model)):
        raise InputError(f"{MODEL_FLAGS[0]} {model}: {problem}")
    _check_schedules(argv)


def unknown_flags(words: str, known: Iterable[str]) -> str:
    """An error message on `words` of a command line, of which the first is no `known` flag."""
    flag = words.split()[0].partition("=")[0]
    near = nearest_first(flag, known, cutoff=0.6)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unrecognized arguments: {words}{hint}; {ALL_FLAGS}"


def names_model(argv: Sequence[str]) -> bool:
    """Whether a command line names a model, by a flag or as its first word."""
    return bool(argv) and (not argv[0].startswith("-") or _value(argv, *MODEL_FLAGS) is not None)


def check_port(argv: Sequence[str]) -> None:
    """Raise `InputError` if another process listens where the server would."""
    host = _value(argv, "--host") or _DEFAULT_HOST
    port = _value(argv, "--port") or _DEFAULT_PORT
    if not port.isdecimal() or _value(argv, "--config") is not None:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            # Set as the server sets it, so that recently closed connections do not block the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise InputError(
                f"--port {port}: another process listens on {host}:{port}; stop it, or choose"
                f" another port, such as --port {int(port) + 1}"
            ) from None


def _check_schedules(argv: Sequence[str]) -> None:
    spec = _value(argv, "--sparrow-schedule")
    page_size = _value(argv, "--page-size") or _DEFAULT_PAGE_SIZE
    dense = (_value(argv, "--attention-backend") or BACKEND) != BACKEND
    # A --config file may set the page size; the full check follows when SGLang has read it.
    open_page_size = _value(argv, "--config") is not None and _value(argv, "--page-size") is None
    if spec is None or dense or open_page_size or page_size not in map(str, PAGE_SIZES):
        return
    for name in spec.split(","):
        if name.strip() and name.strip() != AUTO:
            try:
                load_schedule(name.strip(), int(page_size))
            except ScheduleError as error:
                raise ScheduleError(f"--sparrow-schedule: {error}") from None


def _value(argv: Sequence[str], *flags: str) -> str | None:
    """The last value given to one of `flags`, which overrides the others."""
    last = None
    for word, following in zip_longest(argv, argv[1:]):
        flag, equals, value = word.partition("=")
        if flag in flags:
            last = value if equals else following
    return last


@cache
def known_flags() -> tuple[str, ...]:
    """All flags of SGLang's parser and ours, read from SGLang's source, and a few other strings."""
    return tuple(sorted({*_named_after_fields(), *_spelt_out()}))


def _named_after_fields() -> Iterator[str]:
    for name in argument_names():
        yield f"--{name.replace('_', '-')}"
        yield f"--no-{name.replace('_', '-')}"


def _spelt_out() -> Iterator[str]:
    package = find_spec("sglang")
    assert package is not None and package.origin is not None, "argument_names() found it"
    folder = Path(package.origin).with_name("srt")
    # From 0.5.20 on most flags are written beside their fields, in arg_groups.
    for source in (folder / "server_args.py", *folder.glob("arg_groups/**/*.py")):
        yield from re.findall(r"""["'](--[a-z0-9][\w-]*)["']""", source.read_text("utf-8"))
    yield from ("--help", "--help-all", *_OF_GRPC)
