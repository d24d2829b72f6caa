"""Two faults below us, provoked on purpose.

`python -m sparrow_sglang.benchmarks.kernels.crash_probes` runs it.

plan: a FlashInfer plan that is written over while the device has not copied the one before.
cudnn: the backward pass of cuDNN's attention under a mask, where torch's issue 196678 says that it
gives NaN, with the shapes of the trainer's sparse attention, and how far a model is from there.
Each case is a process of its own, as an illegal memory access ends a CUDA context.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.benchmarks.options import benchmark_parser, prepare_out, require_cuda
from sparrow_sglang.models import embedded_model
from sparrow_sglang.provenance import provenance

MEMORY_GB = 8.0
CASE_S = 60.0
_SLEEP_CYCLES = 1_500_000_000

# Two batches of the same total length: a plan of one has tiles that lie outside the other's rows.
_LONG_FIRST = [24_000, *[40] * 7]
_LONG_LAST = [*[40] * 7, 24_000]
_HEAD_DIM = 128
_KV_HEADS = 8

DESCRIPTION = """\
Provoke two faults of libraries below, and see whether what we do about them helps.
"""
EXAMPLES = """\
  python -m sparrow_sglang.benchmarks.kernels.crash_probes --out crash_probes.json
"""


class _Decode:
    """Stock decode of SGLang for CUDA graphs: FlashInfer's wrapper with buffers of ours."""

    def __init__(self, num_q_heads: int) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self.num_q_heads = num_q_heads
        total, batch = sum(_LONG_FIRST), len(_LONG_FIRST)
        self.indptr = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
        self.indices = torch.arange(total, dtype=torch.int32, device="cuda")
        self.last_page = torch.ones(batch, dtype=torch.int32, device="cuda")
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda"),
            "NHD",
            use_cuda_graph=True,
            # As SGLang chooses for bf16.
            use_tensor_cores=num_q_heads // _KV_HEADS >= 4,
            paged_kv_indptr_buffer=self.indptr,
            paged_kv_indices_buffer=self.indices,
            paged_kv_last_page_len_buffer=self.last_page,
        )
        torch.manual_seed(0)
        shape = (total, 1, _KV_HEADS, _HEAD_DIM)
        self.keys = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self.values = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self.q = torch.randn(batch, num_q_heads, _HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.offsets = {
            name: F.pad(
                torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), [1, 0]
            )
            for name, lengths in (("long_first", _LONG_FIRST), ("long_last", _LONG_LAST))
        }
        self.on_device = {name: offsets.cuda() for name, offsets in self.offsets.items()}
        self.wrapper.plan(
            self.on_device["long_first"],
            self.indices,
            self.last_page,
            num_q_heads,
            _KV_HEADS,
            _HEAD_DIM,
            1,
            data_type=torch.bfloat16,
            q_data_type=torch.bfloat16,
            non_blocking=True,
        )

    def plan(self, name: str) -> None:
        """As SGLang plans each replay: lengths on the host, nothing waits for the device."""
        from flashinfer.decode import fast_decode_plan

        self.indptr.copy_(self.on_device[name])
        fast_decode_plan(
            self.wrapper,
            self.indptr,
            self.indices,
            self.last_page,
            self.num_q_heads,
            _KV_HEADS,
            _HEAD_DIM,
            1,
            data_type=torch.bfloat16,
            q_data_type=torch.bfloat16,
            non_blocking=True,
            global_override_indptr_cpu=self.offsets[name],
        )

    def planned(self) -> torch.Tensor:
        """What the device has of the plan, once the work before is done."""
        return self.wrapper._int_workspace_buffer[: 2**16].clone()

    def run(self) -> torch.Tensor:
        out: torch.Tensor = self.wrapper.run(self.q, (self.keys, self.values))
        return out


def plan_case(num_q_heads: int, guarded: bool, attend: bool) -> dict[str, Any]:
    """Plan two steps while the device is busy; what it then has of the first plan.

    `attend` runs both steps, too, which may end in an illegal memory access.
    """
    from sparrow_sglang.attention_backends.backend import PlanGuard

    decode = _Decode(num_q_heads)
    plans, outputs = {}, {}
    for name in ("long_last", "long_first"):
        decode.plan(name)
        plans[name], outputs[name] = decode.planned(), decode.run()
        torch.cuda.synchronize()
    guard: Any = PlanGuard("cuda") if guarded else nullcontext()
    torch.cuda._sleep(_SLEEP_CYCLES)
    with guard:
        decode.plan("long_first")
    first = decode.planned()
    out = decode.run() if attend else None
    with guard:
        decode.plan("long_last")
    torch.cuda.synchronize()
    result: dict[str, Any] = {
        "first_plan_intact": torch.equal(first, plans["long_first"]),
        "first_plan_is_the_second": torch.equal(first, plans["long_last"]),
        "plans_differ": not torch.equal(plans["long_first"], plans["long_last"]),
    }
    if out is not None:
        expected = outputs["long_first"].float()
        error = (out.float() - expected).norm() / expected.norm()
        result["output_error"] = float(error)
    return result


def cudnn_case(backend: str, rows: int, keys: int, shift: float) -> dict[str, Any]:
    """Gradients of masked attention of `rows` queries; `shift` is added to every logit."""
    torch.manual_seed(0)
    q_heads, kv_heads, dim = 9, 3, 64
    shapes = ((2, q_heads, rows, dim), (2, kv_heads, keys, dim), (2, kv_heads, keys, dim))
    tensors = [0.3 * torch.randn(shape, device="cuda") for shape in shapes]
    tensors[0][..., 0], tensors[1][..., 0] = 1.0, shift * dim**0.5
    last = keys - rows + torch.arange(rows, device="cuda")
    token = torch.arange(keys, device="cuda")
    causal = token <= last[:, None]
    # Pages of 16 tokens, of which a third is kept, the first and the last ones always.
    page = token // 16
    kept = (page % 3 == 0) | (page >= last[:, None] // 16 - 1)
    mask = (causal & kept).expand(2, q_heads, rows, keys)
    grad = torch.randn(shapes[0], device="cuda")

    def gradients(dtype: torch.dtype, backends: list[SDPBackend]) -> list[torch.Tensor]:
        leaves = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in tensors]
        query, key, value = leaves
        with sdpa_kernel(backends):
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        out.backward(grad.bfloat16().to(dtype))
        return [leaf.grad.double() for leaf in leaves if leaf.grad is not None]

    chosen = {
        "cudnn": [SDPBackend.CUDNN_ATTENTION],
        "trusted": [
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ],
    }[backend]
    found = gradients(torch.bfloat16, chosen)
    expected = gradients(torch.float64, [SDPBackend.MATH])
    return {
        "not_finite": [int((~grad.isfinite()).sum()) for grad in found],
        "error": [
            float((one - other).norm() / other.norm())
            for one, other in zip(found, expected, strict=True)
        ],
    }


def gradients_case(seed: int, batches: int = 25) -> dict[str, Any]:
    """Gradients of the trainer's sparse attention for random packs: how many are not finite, and
    their largest error against the same in plain torch."""
    from sparrow_sglang.rl.policy import sparse_policy
    from sparrow_sglang.schedule import load_schedule

    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = random.Random(seed)
    torch.manual_seed(seed)
    not_finite, worst = 0, 0.0
    for _ in range(batches):
        longest = draw.choice([150, 400, 1100])
        lengths = [draw.randint(longest // 2, longest) for _ in range(draw.randint(1, 4))]
        ends = list(accumulate(lengths, initial=0))
        prompts = tuple(draw.randint(1, length - 1) for length in lengths)
        schedule = load_schedule(f"fixed-{draw.choice([64, 128, 256])}", 16)
        rule = sparse_policy.SparseRule(schedule, prompts)
        scale = draw.choice([0.3, 1.0, 3.0])
        tensors = [
            (scale * torch.randn(1, heads, ends[-1], 64, device=device)).bfloat16()
            for heads in (9, 3, 3)
        ]
        grad = torch.randn(1, 9, ends[-1], 64, device=device).bfloat16()
        arguments = (tensors, grad, list(pairwise(ends)), prompts, rule)
        found = _sparse_gradients(*arguments)
        with patch.object(sparse_policy, "_by_rows", lambda rows: True):
            expected = _sparse_gradients(*arguments)
        for one, other in zip(found, expected, strict=True):
            not_finite += int((~one.isfinite()).sum())
            error = (one.float() - other.float()).norm() / other.float().norm()
            worst = max(worst, float(error))
    return {"batches": batches, "not_finite": not_finite, "largest_error": worst}


def _sparse_gradients(
    tensors: Sequence[torch.Tensor], grad: torch.Tensor, *arguments: Any
) -> list[torch.Tensor]:
    from sparrow_sglang.rl.policy.sparse_policy import sparse_attention

    query, key, value = leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    sparse_attention(query, key, value, *arguments, None).backward(grad)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def logsumexp_case() -> dict[str, Any]:
    """The smallest log-sum-exp of attention logits in the embedded model, over its own samples.

    cuDNN's fault needs rows below -88.7.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    smallest: dict[int, float] = {}

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        group = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
        causal = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~causal, float("-inf"))
        low = float(logits.logsumexp(-1).min())
        smallest[module.layer_idx] = min(low, smallest.get(module.layer_idx, low))
        out = logits.softmax(-1) @ value.repeat_interleave(group, 1)
        return out.transpose(1, 2).contiguous(), None

    folder = embedded_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(device)
    ids = tokenizer("Once upon a time, in a small town by the sea,", return_tensors="pt").input_ids
    torch.manual_seed(0)
    many = ids.to(device).expand(2, -1)
    texts = model.generate(many, do_sample=True, max_new_tokens=300, min_new_tokens=300)
    ALL_ATTENTION_FUNCTIONS.register("sparrow_logsumexp", attend)
    model.set_attn_implementation("sparrow_logsumexp")
    with torch.no_grad():
        model(texts, use_cache=False)
    layers = [round(smallest[layer], 1) for layer in sorted(smallest)]
    return {"tokens": texts.numel(), "smallest": min(layers), "by_layer": layers}


def cases() -> Iterator[dict[str, Any]]:
    """Names and arguments of all cases."""
    for num_q_heads in (16, 32):
        for attend in (False, True):
            for guarded in (True, False):
                yield {
                    "probe": "plan",
                    "num_q_heads": num_q_heads,
                    "guarded": guarded,
                    "attend": attend,
                }
    for backend in ("cudnn", "trusted"):
        for rows, keys in ((64, 192), (128, 320), (100, 320), (128, 448), (1, 192), (128, 384)):
            for shift in (0.0, -120.0):
                yield {
                    "probe": "cudnn",
                    "backend": backend,
                    "rows": rows,
                    "keys": keys,
                    "shift": shift,
                }
    for seed in range(4):
        yield {"probe": "gradients", "seed": seed}
    yield {"probe": "logsumexp"}


_PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "plan": plan_case,
    "cudnn": cudnn_case,
    "gradients": gradients_case,
    "logsumexp": logsumexp_case,
}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One case in a process of its own; `failed` says how it ended, if not well."""
    command = [sys.executable, "-m", "sparrow_sglang.benchmarks.kernels.crash_probes", "--case"]
    try:
        done = subprocess.run(
            [*command, json.dumps(case)], capture_output=True, text=True, timeout=CASE_S
        )
    except subprocess.TimeoutExpired:
        return case | {"failed": f"not done within {CASE_S:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        errors = [line for line in lines if "Error" in line] or lines[-1:]
        return case | {"failed": errors[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return case | result


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("kernels.crash_probes", DESCRIPTION, EXAMPLES, "crash_probes.json")
    parser.add_argument("--case", type=json.loads, help="run this one here and print its result")
    parser.add_argument("--probes", nargs="+", default=list(_PROBES), choices=list(_PROBES))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, print and write; a case that fails is a result, too."""
    parser = _parser()
    options = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    if options.case is not None:
        arguments = dict(options.case)
        print(json.dumps(_PROBES[arguments.pop("probe")](**arguments)))
        return 0
    if options.probes != ["logsumexp"]:
        require_cuda(parser, MEMORY_GB, "the probes")
    prepare_out(parser, options.out)
    rows = []
    for case in cases():
        if case["probe"] in options.probes:
            rows.append(run(case))
            write_json(options.out, {**provenance(), "rows": rows})
            print(json.dumps(rows[-1]), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
