"""`sparrow bench serving`: SGLang's own bench_serving against a sparse and a dense server in turn.

The sparse server is `sparrow serve`, the dense one `sglang.launch_server`, with the same flags; the
client is `python -m sglang.bench_serving` with random prompts. Each is a process of its own.
"""

import argparse
import json
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.benchmarks.common import (
    ENGINE_MEMORY_GB,
    STOCK,
    Comparison,
    Side,
    add_model_options,
    add_row,
    begin,
    bench_parser,
    comparison,
    read_result,
    require_context,
    require_cuda,
)
from sparrow_sglang.benchmarks.word_tokenizer import save_shapes
from sparrow_sglang.command_line import count
from sparrow_sglang.schedule import PAGE_SIZE

# The first start on a new machine compiles kernels and captures graphs.
START_S = 900.0
STOP_S, KILL_S = 30.0, 10.0

DESCRIPTION = """\
Run SGLang's bench_serving against a sparse and a dense server in turn, with the same random
requests. Weights are random (nothing is downloaded) unless --model-path names a model. Flags after
-- go to both servers; with --stream-interval 8 among them, decoding does not wait for the client.
"""
EXAMPLES = """\
  sparrow bench serving -- --stream-interval 8
  sparrow bench serving --input-len 1024 --output-len 8192 --num-prompts 128 --max-concurrency 64
  sparrow bench serving --model qwen3-8b -- --disable-prefill-cuda-graph
"""


def prepare_model(compared: Comparison, folder: Path) -> Path:
    """A folder that a server can load: the model's own, or `folder` with shapes and a tokenizer."""
    if compared.has_weights:
        return compared.path
    save_shapes(folder, compared.config)
    return folder


def server_command(
    compared: Comparison, side: Side, model: Path, port: int, flags: Sequence[str], on_gpu: bool
) -> list[str]:
    """The command line of one side's server; `flags` come last, so that they override ours."""
    command = [sys.executable, "-m"]
    if side.schedule:
        command += ["sparrow_sglang.commands.cli", "serve", "--sparrow-schedule", side.schedule]
    else:
        command += ["sglang.launch_server"]
        command += [] if side.backend == STOCK else ["--attention-backend", side.backend]
    command += ["--model-path", str(model), "--page-size", str(PAGE_SIZE)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    if not compared.has_weights:
        # The word tokenizer has no end-of-text token, which a grammar would need.
        command += ["--load-format", "dummy", "--grammar-backend", "none"]
    if not on_gpu:
        # In plain torch, 32-bit arithmetic is the fast path of most CPUs.
        command += ["--dtype", "float32"]
    return [*command, *flags]


@contextmanager
def running_server(command: Sequence[str], url: str, log: Path) -> Iterator[None]:
    """Run `command` with its output in `log`; the body starts once `url`/health answers 200.

    The server and its workers are ended on leaving. Raises `RuntimeError` with the log's end if the
    server ends, or is not healthy within 15 minutes.
    """
    with log.open("w") as file:
        # In a session of its own, its workers can be ended with it.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                end = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
                raise RuntimeError(f"the server did not start; the end of its log:\n{end}")
            time.sleep(0.5)
        yield
    finally:
        _stop(process)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False  # not listening yet


def _stop(process: "subprocess.Popen[bytes]") -> None:
    workers = []
    with suppress(psutil.NoSuchProcess):
        workers = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    process.kill()
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    # Workers are not our children, and a killed one holds its memory and its port for a while.
    psutil.wait_procs(workers, KILL_S)
    process.wait()


def free_port() -> int:
    """A port of this machine that no process uses yet.

    It lies below Linux's ephemeral ports, which may be taken by another process before the server
    binds them. SGLang 0.5.15 wants the port 10,000 above it, too.
    """
    while True:
        port = 20000 + secrets.randbelow(2768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def drive(url: str, model: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run bench_serving against the server at `url`; return its figures under its own names.

    Raises `RuntimeError` if it fails, or if not all requests were answered.
    """
    out = folder / "bench_serving.jsonl"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"]
    command += ["--base-url", url, "--tokenizer", str(model), "--output-file", str(out)]
    # random-ids needs no download; the flush keeps the warm-up's prompt out of the prefix cache.
    command += ["--dataset-name", "random-ids", "--flush-cache", "--disable-tqdm"]
    command += ["--num-prompts", str(options.num_prompts), "--seed", str(options.seed)]
    command += ["--random-input-len", str(options.input_len)]
    command += ["--random-output-len", str(options.output_len)]
    command += ["--random-range-ratio", str(options.range_ratio)]
    command += ["--request-rate", str(options.request_rate)]
    if options.max_concurrency is not None:
        command += ["--max-concurrency", str(options.max_concurrency)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = f"the end of what bench_serving said:\n{done.stdout[-2000:]}"
    if done.returncode or not out.exists():
        raise RuntimeError(f"bench_serving failed; {said}")
    measured: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    if measured["completed"] != options.num_prompts:
        raise RuntimeError(
            f"{measured['completed']} of {options.num_prompts} requests were answered; {said}"
        )
    # This holds all settings of the server, thousands of lines; ours are in the command.
    del measured["server_info"]
    # JSON has no infinity.
    return measured | {"request_rate": str(options.request_rate)}


def run_side(
    compared: Comparison, side: Side, options: argparse.Namespace, flags: Sequence[str], gpu: bool
) -> dict[str, Any]:
    """Start one side's server, measure it and stop it. Raises `RuntimeError`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = prepare_model(compared, folder)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = server_command(compared, side, model, port, flags, gpu)
        with running_server(command, url, folder / "server.log"):
            measured = drive(url, model, options, folder)
    return {
        "model": compared.model,
        "backend": side.backend,
        "schedule": side.schedule,
        "bench_serving": measured,
    }


def compare(rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Sparse against dense: output tokens/s, time per output token and to the first one, above 1
    where sparse is faster. None until both are there.

    Times are medians over requests; that per output token leaves out the first one.
    """
    found = {"sparse" if row["schedule"] else "dense": row["bench_serving"] for row in rows}
    if len(found) < 2:
        return None
    dense, sparse = found["dense"], found["sparse"]
    return {
        "throughput_ratio": sparse["output_throughput"] / dense["output_throughput"],
        "tpot_ratio": dense["median_tpot_ms"] / sparse["median_tpot_ms"],
        "ttft_ratio": dense["median_ttft_ms"] / sparse["median_ttft_ms"],
    }


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("serving", DESCRIPTION, EXAMPLES, "serving.json")
    add_model_options(parser)
    add = parser.add_argument
    add("--num-prompts", type=count, default=32, help="number of requests (default: %(default)s)")
    add("--input-len", type=count, default=16384, help="tokens per prompt (default: %(default)s)")
    add(
        "--output-len",
        type=count,
        default=2048,
        help="new tokens per request (default: %(default)s)",
    )
    add(
        "--range-ratio",
        type=float,
        default=1.0,
        help="lengths are drawn between this share of --input-len or --output-len and all of it"
        " (default: %(default)s)",
    )
    add(
        "--request-rate",
        type=float,
        default=float("inf"),
        help="requests per second (default: all at once)",
    )
    add("--max-concurrency", type=count, help="most requests at a time (default: all)")
    add("--seed", type=int, default=0, help="seed of the prompts (default: %(default)s)")
    return parser


def _check(options: argparse.Namespace) -> Comparison:
    if not 0 <= options.range_ratio <= 1:
        raise ValueError(f"--range-ratio {options.range_ratio}: expected a share from 0 to 1")
    if not options.request_rate > 0:
        raise ValueError(f"--request-rate {options.request_rate}: expected more than 0")
    compared = comparison(options)
    context = int(compared.config["max_position_embeddings"])
    require_context(context, options.input_len, options.output_len)
    return compared


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code is 1 if a side failed, 2 on bad options or no GPU."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    flags = words[split + 1 :]
    parser = _parser()
    options = parser.parse_args(words[:split])
    try:
        compared = _check(options)
    except ValueError as error:
        parser.error(str(error))
    from torch.cuda import is_available

    on_gpu = is_available()
    if not compared.has_weights:
        require_cuda(parser, ENGINE_MEMORY_GB, "weights and KV cache")
    begin(parser, options, server_flags=flags)
    for side in compared.sides:
        try:
            row = run_side(compared, side, options, flags, on_gpu)
        except RuntimeError as error:
            print(f"{parser.prog}: error: {side.name}: {error}", file=sys.stderr)
            return 1
        add_row(options.out, row)
        seen = row["bench_serving"]
        print(
            f"{compared.model} {side.name} ({side.schedule or side.backend}): first token"
            f" {seen['median_ttft_ms']:.0f} ms, then {seen['median_tpot_ms']:.2f} ms a token"
            f" (medians); {seen['output_throughput']:,.0f} output tokens/s",
            flush=True,
        )
    ratios = compare(read_result(options.out)["rows"])
    write_json(options.out, read_result(options.out) | {"compared": ratios})
    if ratios:
        print(
            f"{compared.model}: {ratios['throughput_ratio']:.2f}x the dense output tokens/s,"
            f" a token in 1/{ratios['tpot_ratio']:.2f} of the dense time, the first token in"
            f" 1/{ratios['ttft_ratio']:.2f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
