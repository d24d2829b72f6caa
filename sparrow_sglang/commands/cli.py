"""The command `sparrow`."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from sparrow_sglang import noise
from sparrow_sglang.command_line import OneLineParser
from sparrow_sglang.errors import InputError, SparrowError
from sparrow_sglang.json_values import shortened

DESCRIPTION = """\
Sparse decode for stock SGLang: each generated token reads a budget of KV pages instead of all of
them. The budget grows with the length of the sequence.
"""

EPILOG = """\
examples:
  sparrow doctor                                   is this machine ready?
  sparrow serve                                    a server with the small embedded model
  sparrow serve --model-path Qwen/Qwen3-4B         a server with your model
  sparrow plan --model-path Qwen/Qwen3-4B          what would it save? (no GPU needed)
  sparrow schedules                                which models have a schedule?
  sparrow bench step                               what does it save, measured on this GPU?
  sparrow calibrate --model-path M --target 0.86   which budget does your model need?
  sparrow train examples/story_smollm2.toml        GRPO from sparse rollouts
  sparrow report runs/story                        an HTML page about a run; several are compared

sparrow COMMAND --help explains a command and its options.
"""

DOCTOR_HELP = """\
Check whether sparse decode works here, one line per check, in the order in which a server would
fail; the exit code is 1 if one failed. Takes the flags of `sparrow serve`; loads no weights.
"""

DOCTOR_EPILOG = """\
examples:
  sparrow doctor
  sparrow doctor --model-path Qwen/Qwen3-4B
  sparrow doctor --model-path Qwen/Qwen3-4B --sparrow-schedule my-schedule.json --page-size 32
"""

BENCH_HELP = """\
Measure on this machine's NVIDIA GPU. Weights and KV are random, in the shapes of real models
(Qwen3-1.7B by default). Results go to a JSON file, with device, versions and commit.

  step      prefill and a decode step of SGLang, dense and sparse, for chosen batches and lengths
  rollout   a replay of a rollout's response lengths until the last sequence ends, sparse and dense;
            with --model-path your own model, also without a GPU

To measure a server, run SGLang's python -m sglang.bench_serving against it.
"""

BENCH_EPILOG = """\
examples:
  sparrow bench step --models qwen3-1.7b --cases 16x32768 16x16384 1x32768
  sparrow bench step --backends sparrow,fa3,flashinfer --schedules fixed-1024
  sparrow bench rollout --sequences 64 --mean-tokens 8192

16x32768 means 16 sequences of 32768 cached tokens each. Each benchmark has a --help.
"""

BENCHMARKS = ("step", "rollout")
# Each is a module of this folder, which is imported only when the command is used.
COMMANDS = {
    "plan": "predict from the model's shapes what a schedule saves (no GPU needed)",
    "schedules": "list the schedules that are shipped, and the models that have one",
    "calibrate": "measure the cheapest schedule of a model that holds a tail target",
    "train": "train with GRPO from sparse rollouts",
    "report": "an HTML page about a run or a calibration, or several runs compared",
}


def parser_for(named: str | None) -> argparse.ArgumentParser:
    """The parser of `sparrow`, with the options of the command that is named."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(
        prog="sparrow", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=version("sparrow-sglang"))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("serve", help="start an OpenAI-compatible server", add_help=False)
    commands.add_parser(
        "doctor",
        help="check machine, SGLang, plugin and model",
        usage="sparrow doctor [--model-path MODEL] [SGLang flags ...]",
        description=DOCTOR_HELP,
        epilog=DOCTOR_EPILOG,
        formatter_class=raw,
    )
    for command, what in COMMANDS.items():
        if command == named:
            import_module(f"sparrow_sglang.commands.{command}").add_parser(commands)
        else:
            commands.add_parser(command, help=what)
    bench = commands.add_parser(
        "bench",
        help="measure steps and rollouts on this GPU",
        usage=f"sparrow bench {{{','.join(BENCHMARKS)}}} [options ...]",
        description=BENCH_HELP,
        epilog=BENCH_EPILOG,
        formatter_class=raw,
    )
    bench.add_argument("benchmark", choices=BENCHMARKS, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 if it failed, 2 if the command line is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    noise.leave_out()
    # Flags of serve and doctor are parsed by SGLang, options of bench by the benchmark.
    if words[:1] == ["serve"]:
        return _serve(words[1:])
    if words[:1] == ["doctor"] and not {"-h", "--help"} & set(words):
        return _doctor(words[1:])
    if words[:1] == ["bench"] and words[1:2] and words[1] in BENCHMARKS:
        benchmark = import_module(f"sparrow_sglang.benchmarks.{words[1]}")
        return int(benchmark.main(words[2:]))
    parser = parser_for(words[0] if words else None)
    args = parser.parse_args(words)
    if args.command not in COMMANDS:
        parser.error(f"{' '.join(words)}: expected the same without --")
    return _run(args)


def _serve(argv: Sequence[str]) -> int:
    from sparrow_sglang.commands import serve

    if {"-h", "--help"} & set(argv):
        print(serve.HELP, end="")
        return 0
    try:
        if "--help-all" in argv:
            serve.print_all_flags()
        else:
            serve.serve(argv)
    except InputError as error:
        print(f"sparrow serve: error: {shortened(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sparrow serve: stopped", file=sys.stderr)
        return 130
    return 0


def _doctor(argv: Sequence[str]) -> int:
    from sparrow_sglang.commands import doctor

    statuses: set[str] = set()
    for check in doctor.examine(argv):
        print(f"{check.status:<5} {check.name:<12} {shortened(check.detail)}", flush=True)
        statuses.add(check.status)
    if "FAIL" in statuses:
        print("Something is in the way; see FAIL above.")
    else:
        print("It works, but see WARN above." if "WARN" in statuses else "All good.")
    return int("FAIL" in statuses)


def _run(args: argparse.Namespace) -> int:
    try:
        return int(args.run(args))
    except (ValueError, SparrowError, OSError) as error:
        print(f"sparrow {args.command}: error: {shortened(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"sparrow {args.command}: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
