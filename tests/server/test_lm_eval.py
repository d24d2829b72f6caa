"""lm-eval, unmodified, by the commands of examples/openai_server against a real server.

SPARROW_LM_EVAL_PYTHON names a Python that has lm-eval with its extras api and hf, if this Python
does not have them.
"""

import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engines import save_tiny_model
from servers import start_server

from sparrow_sglang.schedule import BudgetSchedule

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_server"
PAGE = EXAMPLE / "README.md"
PYTHON = os.environ.get("SPARROW_LM_EVAL_PYTHON") or (
    sys.executable if find_spec("lm_eval") and find_spec("accelerate") else None
)
pytestmark = [
    pytest.mark.skipif(
        PYTHON is None,
        reason="lm-eval is not installed: pip install 'lm-eval[api,hf]==0.4.13', here or for a"
        " Python that SPARROW_LM_EVAL_PYTHON names",
    ),
]

FP32 = 2e-4  # |difference| of a log-prob between SGLang and transformers, both in fp32
KEY = "secret"
SPARSE = BudgetSchedule.fixed(64)
SYMBOLS = ["\x00", "\n", *(s for s in string.printable if s == " " or not s.isspace())]
FACTS, ROOMS = "sparrow_facts", "sparrow_rooms"


@dataclass(frozen=True)
class Evaluated:
    """Results of the page's three commands."""

    results: Path

    def samples(self, run: str, task: str) -> list[dict[str, Any]]:
        """The requests of a task and what came back, in the order of its documents."""
        [path] = self.results.glob(f"{run}/*/samples_{task}_*.jsonl")
        lines = path.read_text("utf-8").splitlines()
        return sorted(map(json.loads, lines), key=lambda sample: int(sample["doc_id"]))

    def score(self, run: str, task: str, metric: str) -> float:
        [path] = self.results.glob(f"{run}/*/results_*.json")
        value: float = json.loads(path.read_text("utf-8"))["results"][task][f"{metric},none"]
        return value

    def texts(self, run: str) -> list[str]:
        return [sample["resps"][0][0] for sample in self.samples(run, ROOMS)]


def save_model_of_characters(folder: Path) -> str:
    """A tiny random checkpoint with a token per printable ASCII character; 0 ends a string.

    Encoding and decoding leaves its strings unchanged, so that they can be compared.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    save_tiny_model(folder, spread=0.15, vocab_size=len(SYMBOLS), bos_token_id=0, eos_token_id=0)
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(SYMBOLS)}, []))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SYMBOLS[0],
        pad_token=SYMBOLS[0],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return str(folder)


def commands() -> list[str]:
    """The commands of the page that call lm-eval, one string each."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("python3 -m lm_eval ")]


def run(command: str, replaced: Mapping[str, str], environment: Mapping[str, str]) -> None:
    for written, meant in replaced.items():
        command = command.replace(written, meant)
    done = subprocess.run(
        command, shell=True, cwd=EXAMPLE, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    model = save_model_of_characters(tmp_path_factory.mktemp("characters"))
    results = tmp_path_factory.mktemp("results")
    environment = dict(os.environ) | {
        "MODEL": model,
        "OPENAI_API_KEY": KEY,
        # lm-eval keeps its copies of the tasks' data there.
        "HF_HOME": str(tmp_path_factory.mktemp("hub")),
        "HF_HUB_OFFLINE": "1",
        # Compiling what lm-eval imports takes longer than the evaluation.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    with start_server(
        model,
        skip_tokenizer_init=False,
        grammar_backend="none",
        attention_backend="sparrow",
        sparrow_schedule=SPARSE.name,
        served_model_name="smollm2-135m",
        api_key=KEY,
    ) as url:
        replaced = {
            "python3": PYTHON or "",
            "http://127.0.0.1:30000": url,
            "--output_path results": f"--output_path {results}",
        }
        # The commands run in parallel, since each imports for a quarter of a minute.
        with ThreadPoolExecutor() as pool:
            list(pool.map(partial(run, replaced=replaced, environment=environment), commands()))
    return Evaluated(results)


def test_log_probs_of_prompts_are_those_of_transformers(evaluated: Evaluated) -> None:
    """Prompts are token ids and strings, one at a time and several at once."""
    reference = evaluated.samples("reference", FACTS)
    assert len(reference) == 12
    for name in ("sparse", "dense"):
        for got, wanted in zip(evaluated.samples(name, FACTS), reference, strict=True):
            assert got["arguments"] == wanted["arguments"]
            for (choice, place), (logprob, greedy) in zip(
                enumerate(got["filtered_resps"]), wanted["filtered_resps"], strict=True
            ):
                tokens = len(wanted["doc"]["choices"][choice]) + 1
                assert float(place[0]) == pytest.approx(float(logprob), abs=FP32 * tokens)
                assert place[1] == greedy
        found = evaluated.score(name, FACTS, "acc")
        assert found == evaluated.score("reference", FACTS, "acc")


def test_dense_texts_are_those_of_transformers(evaluated: Evaluated) -> None:
    wanted = evaluated.texts("reference")
    assert len(wanted) == 8 and len("".join(wanted)) > 30
    assert evaluated.texts("dense") == wanted
    assert evaluated.texts("sparse") != wanted
    score = evaluated.score("dense", ROOMS, "exact_match")
    assert score == evaluated.score("reference", ROOMS, "exact_match")
