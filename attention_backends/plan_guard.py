"""Order between FlashInfer's plans and what the device still has to copy of them."""

from types import TracebackType

import torch


class PlanGuard:
    """A context that a plan of stock decode is made in, after the last one has been copied.

    FlashInfer writes a plan to pinned memory of its wrapper and has it copied to the device behind
    whatever runs there. SGLang plans a step while the one before runs, and where another process
    has the device for a while, that copy has not begun when the next plan is written over it.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._copied = torch.cuda.Event() if torch.device(device).type == "cuda" else None

    def __enter__(self) -> None:
        if self._copied:
            self._copied.synchronize()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._copied:
            self._copied.record()
