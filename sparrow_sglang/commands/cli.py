"""The command `sparrow`."""

import argparse
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from sparrow_sglang.command_line import OneLineParser
from sparrow_sglang.errors import SparrowError
from sparrow_sglang.json_values import shortened
from sparrow_sglang.processes import shield_children

DESCRIPTION = """\
Faster decode on stock SGLang. Sparse decode: each generated token reads a budget of KV pages, which
grows with the sequence, instead of all of them. Lossless decoding: sparse steps draft tokens, and
one dense step verifies them.
"""

EPILOG = """\
examples:
  sparrow doctor                                   is this machine ready?
  sparrow serve                                    a server with the small embedded model
  sparrow serve --model-path Qwen/Qwen3-4B         a server with your model, sparse
  sparrow serve --model-path Qwen/Qwen3-4B --speculative-algorithm SPARROW    the same, lossless
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
            with --model-path your own model's answers, also without a GPU
  attention a sparse step's attention beside FlashInfer's
  distill   rollouts with a DistillSparse adapter, merged and as LoRA
  all       what the documentation quotes, in parts

To measure a server, run SGLang's python -m sglang.bench_serving against it.
"""

BENCH_EPILOG = """\
examples:
  sparrow bench step --models qwen3-1.7b --cases 16x32768 16x16384 1x32768
  sparrow bench step --sides sparrow fa3 flashinfer --schedules fixed-1024
  sparrow bench rollout --sequences 64 --mean-tokens 8192

16x32768 means 16 sequences of 32768 cached tokens each. Each benchmark has a --help.
"""

INSTALL = "pip install sparrow-sglang[rl,data,report] installs all that it requires"
BENCHMARKS = ("step", "rollout", "attention", "distill", "all")
# Each is a module of this folder, which is imported only when the command is used.
COMMANDS = {
    "plan": "predict from the model's shapes how long a step takes (no GPU needed)",
    "schedules": "list the schedules that are shipped, and the models that have one",
    "calibrate": "measure the cheapest schedule of a model that holds a tail target",
    "train": "train with GRPO from sparse rollouts",
    "report": "an HTML page about a run or a calibration, or several runs compared",
}


def parser_for(named: str) -> argparse.ArgumentParser:
    """The parser of `sparrow`, with the options of the command that is named. SGLang parses the
    flags of serve and doctor, the benchmarks their own."""
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
        if command != named:
            commands.add_parser(command, help=what)
            continue
        module = import_module(f"sparrow_sglang.commands.{command}")
        texts = {"description": module.DESCRIPTION, "epilog": module.EPILOG}
        module.add_arguments(commands.add_parser(command, **texts, formatter_class=raw))
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
    arguments = list(sys.argv[1:] if argv is None else argv)
    shield_children()
    command, *rest = arguments or [""]
    title, module = f"sparrow {command}", f"sparrow_sglang.commands.{command}"
    passed_on = command == "serve" or (command == "doctor" and not {"-h", "--help"} & set(rest))
    if command == "bench" and rest and rest[0] in BENCHMARKS:
        title, module = f"{title} {rest[0]}", f"sparrow_sglang.benchmarks.{rest.pop(0)}"
        passed_on = True
    try:
        if not passed_on:
            parser = parser_for(command)
            args = parser.parse_args(arguments)
            if args.command not in COMMANDS:
                parser.error(f"{' '.join(arguments)}: expected the same without --")
        imported = import_module(module)
        code = int(imported.main(rest) if passed_on else imported.run(args))
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        if str(error.name).startswith("sparrow_sglang"):
            raise
        why = f"the package {error.name} is not installed; {INSTALL}"
        print(f"{title}: error: {why}", file=sys.stderr)
        return 2
    except (ValueError, SparrowError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            return 0
        print(f"{title}: error: {shortened(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{title}: stopped", file=sys.stderr)
        return 130


def _reader_left() -> bool:
    """Whether the reader of our output, such as `head`, has closed the pipe."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    if not pipe.poll(0):
        return False
    # Python flushes once more when it ends, and would complain then.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


if __name__ == "__main__":
    sys.exit(main())
