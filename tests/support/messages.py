"""Messages of requests, as SGLang's tokenizer process sends them to its schedulers."""

from array import array
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams


def tokenized(**fields: Any) -> TokenizedGenerateReqInput:
    """A message with these fields, of its own or of its sampling parameters; others are neutral."""
    given: dict[str, Any] = {"input_text": None, "input_ids": [5, 6, 7], "input_embeds": None}
    given |= {"mm_inputs": None, "stream": False, "top_logprobs_num": 0, "token_ids_logprob": None}
    given |= {"token_type_ids": None, "return_logprob": False, "logprob_start_len": -1}
    sampling = SamplingParams()
    sampling.normalize(None)
    for name in [name for name in fields if hasattr(sampling, name)]:
        setattr(sampling, name, fields.pop(name))
    given |= fields
    if isinstance(given["input_ids"], list):
        given["input_ids"] = array("q", given["input_ids"])
    return TokenizedGenerateReqInput(sampling_params=sampling, **given)
