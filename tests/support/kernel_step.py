"""One decode step's tensors and launches for kernel tests, and Triton's interpreter for them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparrow_sglang.attention_backends import reference
from sparrow_sglang.attention_backends.kernels import decode, select
from sparrow_sglang.attention_backends.kernels.decode import DecodeLaunch, allocate_decode_scratch
from sparrow_sglang.attention_backends.kernels.select import (
    SelectLaunch,
    SelectScratch,
    allocate_select_scratch,
)
from sparrow_sglang.attention_backends.landmarks import Int4Landmarks, Landmarks, MeanLandmarks

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SINKS, RECENTS = 1, 2
POISON = -7
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=ON_GPU)]


def require_passes_interpreted(file: Path) -> None:
    """Fail unless the file's cases pass in Triton's interpreter, in a process of their own."""
    # The paths of this process are kept: the package may be in one of them, not installed.
    folders = [str(file.parent), str(Path(__file__).parent), *filter(None, sys.path)]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-m", "pytest", str(file), "--noconftest", "-q"]
    # The time limit is that of the calling test.
    command += ["-p", "no:cacheprovider", "--timeout=0"]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "passed" in run.stdout, run.stdout


@contextmanager
def fast_interpreter() -> Iterator[pytest.MonkeyPatch]:
    """Leave out what takes most of the time of Triton's interpreter."""
    import triton.language as tl
    from triton.runtime import interpreter

    # It replaces the functions of the language at every call. Here they stay replaced.
    replaced = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
        # A GPU does not look for overflows either.
        options = interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield patch
    replaced.restore()


@pytest.fixture(autouse=True, scope="module")
def rounding_of_a_gpu() -> Iterator[None]:
    """Make Triton 3.6's interpreter treat bf16 as a GPU does, in files that import this. The
    interpreter truncates casts to bf16 and multiplies the bit patterns in tl.dot; a GPU rounds to
    nearest even and multiplies the values."""
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widen(data: np.ndarray) -> np.ndarray:
        return (data.astype(np.uint32) << 16).view(np.float32)

    def cast(builder: InterpreterBuilder, src: TensorHandle, to: tl.dtype) -> TensorHandle:
        source, target = src.dtype.scalar, to.scalar
        if source == tl.bfloat16 and target == tl.float32:
            return TensorHandle(widen(src.data), target)
        if source == tl.float32 and target == tl.bfloat16:
            bits = np.ascontiguousarray(src.data).view(np.uint32)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            return TensorHandle(np.where(np.isnan(src.data), 0x7FC0, rounded), target)
        return plain_cast(builder, src, to)

    def dot(
        builder: InterpreterBuilder,
        a: TensorHandle,
        b: TensorHandle,
        acc: TensorHandle,
        *rest: object,
    ) -> TensorHandle:
        if a.dtype.scalar == tl.float8e4nv:
            return plain_dot(builder, a, b, acc, *rest)
        left, right = (
            widen(x.data) if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32)
            for x in (a, b)
        )
        total = np.matmul(left, right) + acc.data
        return TensorHandle(total.astype(acc.data.dtype), acc.dtype.scalar)

    plain_cast, plain_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    with fast_interpreter() as patch, np.errstate(all="ignore"):
        patch.setattr(InterpreterBuilder, "cast_impl", cast)
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield


class Step:
    """One decode step's tensors. Pages are scattered; slots that no request owns are NaN."""

    def __init__(
        self,
        device: str,
        lengths: list[int],
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 64,
        page_size: int = 16,
        dtype: torch.dtype = BF16,
        seed: int = 0,
        int4: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.page_size, self.lengths = page_size, lengths
        self.pages = [-(-length // page_size) for length in lengths]
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        held = sum(self.pages) + 1
        shape = (held * page_size, heads[1], head_dim)
        k, v = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        table = torch.zeros(len(lengths), max(self.pages) + 3, dtype=torch.int32)
        order = torch.randperm(held - 1, generator=generator) + 1
        for row, (length, pages) in enumerate(zip(lengths, self.pages, strict=True)):
            table[row, :pages], order = order[:pages].int(), order[pages:]
            slots = self._slots(table[row, :pages])[:length]
            for pool in (k, v):
                pool[slots] = torch.randn(length, *shape[1:], generator=generator).to(dtype)
        self.k, self.v, self.page_table = k.to(device), v.to(device), table.to(device)
        self.q = torch.randn(len(lengths), heads[0], head_dim, generator=generator)
        self.q = self.q.to(dtype).to(device)
        # The landmark of a page with unwritten slots is NaN, which shows if a kernel scores it.
        # Landmarks are computed on the CPU, as some GPU kernels of torch divide by multiplying with
        # a reciprocal.
        computed = reference.page_landmarks(k.view(held, page_size, *shape[1:]), int4)
        # Means are kept without the axis of landmarks of a page, which has one.
        self.landmarks: torch.Tensor | Int4Landmarks
        if isinstance(computed, Int4Landmarks):
            self.landmarks = Int4Landmarks(*(x.contiguous().to(device) for x in computed))
        else:
            self.landmarks = computed.means.squeeze(2).to(device)

    def stored(self) -> Landmarks:
        """The landmarks as kernels take them, in the same memory."""
        if isinstance(self.landmarks, Int4Landmarks):
            return self.landmarks
        return MeanLandmarks(self.landmarks[:, :, None])

    def _slots(self, pages: torch.Tensor) -> torch.Tensor:
        return (pages[:, None].long() * self.page_size + torch.arange(self.page_size)).flatten()

    def select(
        self,
        budget: int,
        width: int,
        launch: SelectLaunch,
        scratch: SelectScratch | None = None,
        update_landmark: bool = False,
        new_tokens: select.NewTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Page ids [bs, Hkv, width] under a budget in pages, and how many of them count."""
        batch, heads = len(self.lengths), self.k.shape[1]
        device = self.q.device
        page_ids = torch.full((batch, heads, width), POISON, dtype=torch.int32, device=device)
        counts = torch.tensor(self.pages, dtype=torch.int32, device=device).clamp(max=budget)
        scratch = scratch or allocate_select_scratch(batch, heads, self.page_table.shape[1], device)
        select.select_pages(
            self.q,
            self.k,
            self.v,
            self.stored(),
            self.page_table,
            self.seq_lens,
            counts,
            page_ids,
            new_tokens,
            page_size=self.page_size,
            sink_pages=SINKS,
            recent_pages=RECENTS,
            scratch=scratch,
            launch=launch,
            update_landmark=update_landmark,
        )
        assert not scratch.arrivals.any(), "arrival counters must be zero for the next launch"
        return page_ids, counts

    def decode(
        self, page_ids: torch.Tensor, counts: torch.Tensor, launch: DecodeLaunch
    ) -> torch.Tensor:
        batch, num_q_heads, head_dim = self.q.shape
        out = torch.full_like(self.q, torch.nan)
        parts = batch * num_q_heads * launch.splits
        scratch = allocate_decode_scratch(parts, head_dim, self.q.device)
        scratch.partial_out.fill_(torch.nan)
        scratch.partial_lse.fill_(torch.nan)
        decode.sparse_decode(
            self.q,
            self.k,
            self.v,
            page_ids,
            counts,
            self.seq_lens,
            out,
            page_size=self.page_size,
            sm_scale=head_dim**-0.5,
            scratch=scratch,
            launch=launch,
        )
        return out

    def attend(self, page_ids: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Output of the torch definition in fp32, on the same inputs."""
        pools = (pool.float().nan_to_num() for pool in (self.k, self.v))
        ids = page_ids.clamp(min=0).long()
        scale, lengths = self.q.shape[-1] ** -0.5, self.seq_lens.long()
        return reference.sparse_decode(
            self.q.float(), *pools, ids, counts.long(), lengths, self.page_size, scale
        )


def assert_selected(
    step: Step, page_ids: torch.Tensor, counts: torch.Tensor, budgets: list[int]
) -> None:
    """The kernel kept the definition's pages, except for scores that fp32 cannot tell apart."""
    table, landmarks = step.page_table, step.landmarks
    kept = [min(n, b) for n, b in zip(step.pages, budgets, strict=True)]
    assert counts.tolist() == kept
    num_pages, num_kept = (torch.tensor(x, device=table.device) for x in (step.pages, kept))
    scores = reference.score_pages(step.q, step.stored(), table)
    wanted = reference.select_pages(scores, num_pages, num_kept, SINKS, RECENTS)
    group = step.q.shape[1] // landmarks.shape[1]
    for row, count in enumerate(kept):
        assert (page_ids[row, :, count:] == POISON).all(), "entries past the count were written"
        logical = {int(page): n for n, page in enumerate(table[row, : step.pages[row]])}
        for head in range(landmarks.shape[1]):
            got = [logical[page] for page in page_ids[row, head, :count].tolist()]
            want = wanted[row, head, :count].tolist()
            assert got == sorted(set(got)), "pages must be distinct and ascending"
            if got == want:
                continue
            query = step.q[row].double().view(-1, group, step.q.shape[2])[head].mean(0)

            def terms(page: int, row: int = row, head: int = head, query: torch.Tensor = query):
                return query * landmarks[table[row, page], head].double()

            swapped_in = sorted(set(got) - set(want), key=lambda page: float(terms(page).sum()))
            swapped_out = sorted(set(want) - set(got), key=lambda page: float(terms(page).sum()))
            for page, other in zip(swapped_in, swapped_out, strict=True):
                # Rounding a score to bf16 changes it by up to 2^-9. The error of an fp32 sum of D
                # terms is far smaller, and only such an error may exchange two pages.
                allowed = 2**-18 * float(terms(page).abs().sum() + terms(other).abs().sum())
                assert abs(float(terms(page).sum() - terms(other).sum())) <= allowed


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
