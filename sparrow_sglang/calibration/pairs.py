"""Measure with an engine that prefills prompts how much each rotary pair tells landmarks apart.

In: a job. Out: an array by layer, KV head and pair, kept in a folder of the work folder.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.calibration import engine
from sparrow_sglang.calibration.choice import CalibrationError
from sparrow_sglang.calibration.job import Job
from sparrow_sglang.calibration.prompts import UNSCORED, Prompt
from sparrow_sglang.calibration.rule import even_schedule, landmark_tokens
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.config import schedule_from
from sparrow_sglang.hf_config import head_dim_of, num_kv_heads_of, num_layers_of
from sparrow_sglang.mismatch.token_bins import whole_pages
from sparrow_sglang.progress import Progress
from sparrow_sglang.selection import SelectionRule

_STEP = "pairs"


def pair_variances(job: Job, prompts: Sequence[Prompt]) -> NDArray[np.float64]:
    """Variance over landmarks of each pair's part of the scores, [layers, KV heads, D/2].

    `attention_backends.pair_variance` sums it over the latest queries of each prefill pass; it is 0
    in layers without landmarks. Raises `CalibrationError` as `measure_missing` does.
    """
    tokens = landmark_tokens(job.page_size)
    settings = job.settings | {"step": _STEP, "landmark_tokens": tokens}
    of_step = replace(job, folder=job.folder / _STEP, settings=settings)
    path = of_step.work.path / "variances.json"
    if path.exists():
        return np.array(json.loads(path.read_text("utf-8")))
    layers = num_layers_of(job.hf_config)
    whole = whole_pages(job.context, job.page_size)
    schedule = even_schedule("all", SelectionRule(), layers, job.page_size, whole)
    schedule.save(of_step.folder / "schedule.json")
    arguments = job.engine_args | {"sparrow_schedule": str(of_step.folder / "schedule.json")}
    with (
        schedule_from("sparrow calibrate, which measures rotary pairs"),
        closing(Progress(len(prompts), "prompt")) as progress,
    ):
        progress.show("starting the engine")
        with engine.running_engine(job.model_path, arguments) as running:
            try:
                endpoint = connect(running)
                endpoint.call_sparrow(_STEP, landmark_tokens=tokens)
                # Send prompts one by one, so that every run sums in the same order.
                for prompt in prompts:
                    endpoint.generate([_request(prompt, job.context - UNSCORED)])
                    progress.advance()
                found = endpoint.call_sparrow(_STEP)
            except RuntimeError as error:
                raise CalibrationError(
                    f"the engine failed ({error}) while rotary pairs were measured: repeat the"
                    " command"
                ) from error
    shape = (layers, num_kv_heads_of(job.hf_config), head_dim_of(job.hf_config) // 2)
    variances = np.zeros(shape)
    for layer, rows in found["layers"].items():
        variances[int(layer)] = rows
    write_json(path, variances.tolist())
    return variances


def _request(prompt: Prompt, room: int) -> Mapping[str, object]:
    return {
        "input_ids": [*prompt.input_ids, *prompt.response_ids][:room],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "log_metrics": False,
    }
