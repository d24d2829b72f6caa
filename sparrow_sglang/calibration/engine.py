"""Measuring with an SGLang engine whose death raises an error instead of ending this process.

In: a job. Out: its measurements in the work folder; the engine is shut down afterwards.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from types import FrameType
from typing import Any

from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.job import Job
from sparrow_sglang.calibration.measure import measure
from sparrow_sglang.client.control import set_schedule
from sparrow_sglang.config import schedule_from
from sparrow_sglang.mismatch.exact_rates import recording
from sparrow_sglang.plugin.refusals import BACKEND
from sparrow_sglang.plugin.server_log import keep_warnings
from sparrow_sglang.progress import Progress


class MeasuringEngine(ExitStack):
    """An engine for the measurements of one calibration, which starts when the first is missing."""

    def __init__(self) -> None:
        super().__init__()
        self._engine: Any = None
        self._began = time.monotonic()

    def measure_missing(self, job: Job) -> None:
        """Measure the samples that the job's work folder lacks; starts no engine if it lacks none.

        The engine of an earlier job is used again, which must have this job's landmarks. Raises
        `CalibrationError` as `measure` does.
        """
        if len(job.work.load()) == len(job.samples):
            return
        with closing(Progress(len(job.samples), "generation")) as progress:
            if self._engine is None:
                progress.show("starting the engine")
                with (
                    recording(job.options.batch, job.options.new_tokens),
                    schedule_from("sparrow calibrate, whose requests ask for their own"),
                ):
                    engine = running_engine(job.model.path, job.engine_args)
                    self._engine = self.enter_context(engine)
            else:
                try:
                    set_schedule(self._engine, job.engine_args["sparrow_schedule"])
                except RuntimeError as error:
                    raise CalibrationError(
                        f"the engine failed ({error}): repeat the command"
                    ) from error
            measure(self._engine, job.samples, job.work, job.options.batch, progress)

    def cost(self) -> dict[str, float]:
        """Seconds since this object was made, without what an earlier run had measured, and the GiB
        in use on the first GPU; empty if nothing was missing."""
        import torch

        if self._engine is None:
            return {}
        cost: dict[str, float] = {"seconds": round(time.monotonic() - self._began)}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info(0)
            cost["gpu_memory_gib"] = round((total - free) / 2**30, 1)
        return cost


@contextmanager
def running_engine(model_path: str, engine_args: dict[str, Any]) -> Iterator[Any]:
    """An engine with sparse decode that takes token ids; `CalibrationError` if it does not start.

    Without a GPU it computes in float32, which is fastest on most CPUs, with room for two sequences
    of full length.
    """
    import sglang
    import torch

    defaults: dict[str, Any] = {
        "attention_backend": BACKEND,
        "skip_tokenizer_init": True,
        "log_level": "error",
        "custom_sigquit_handler": _raise_failed_start,
        # A prefill pass replayed from a CUDA graph would not run the comparison (0.5.17).
        "disable_prefill_cuda_graph": True,
    }
    if not torch.cuda.is_available():
        room = 2 * int(engine_args.get("context_length", 4096))
        defaults |= {"dtype": "float32", "max_total_tokens": room}
    keep_warnings()
    try:
        engine = sglang.Engine(model_path=model_path, **(defaults | engine_args))
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise CalibrationError(f"the engine does not start: {error}") from error
    try:
        stop_waiting_when_it_dies(engine)
        yield engine
    finally:
        engine.shutdown()


def stop_waiting_when_it_dies(engine: Any) -> None:
    """Make a call that waits for the engine raise `RuntimeError` if a process of it dies.

    SGLang's own handler kills this process without a message (0.5.17).
    """
    from sglang.srt.managers.tokenizer_manager import SignalHandler

    class StopLoop(SignalHandler):
        def running_phase_sigquit_handler(
            self, signum: int | None = None, frame: FrameType | None = None
        ) -> None:
            engine.loop.stop()

    engine.tokenizer_manager.signal_handler_class = StopLoop


def _raise_failed_start(signum: int, frame: FrameType | None) -> None:
    raise RuntimeError("a process of it failed; its traceback is above")
