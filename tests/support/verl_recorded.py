"""The batches that the example's sampler has seen, dumped so that a test can recompute the tail."""

import json
import os
from pathlib import Path
from typing import Any

import transfer_queue
from sparrow_verl import RATES, TailSampler


class DumpingSampler(TailSampler):
    """Writes prompts, responses and rates of the batches to the file that $SPARROW_DUMP names."""

    def _tail(self, batch: Any) -> dict[str, float]:
        fields = transfer_queue.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            select_fields=["prompts", "responses", "extra_fields"],
        )
        extras = fields.pop("extra_fields").tolist()
        rows = [
            {"prompt": prompt.tolist(), "response": response.tolist(), "rates": extra.get(RATES)}
            for prompt, response, extra in zip(
                fields["prompts"].unbind(), fields["responses"].unbind(), extras, strict=True
            )
        ]
        with Path(os.environ["SPARROW_DUMP"]).open("a") as file:
            file.write(json.dumps(rows) + "\n")
        return super()._tail(batch)
