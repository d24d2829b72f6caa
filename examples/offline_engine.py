"""Generate with `sglang.Engine`, sparsely and then densely, and print what each decode step read.

python offline_engine.py Qwen/Qwen3-4B      without a model, the small embedded one
"""

import inspect
import sys
import textwrap

import sglang

from sparrow_sglang.models import embedded_model

PROMPT = f"{inspect.getsource(textwrap)[:6000]}\n\n# What this module does:"


def main() -> None:
    model = sys.argv[1] if sys.argv[1:] else str(embedded_model())
    engine = sglang.Engine(model_path=model, attention_backend="sparrow")
    for option in ({"report": True}, {"report": True, "dense": True}):
        sampling = {"max_new_tokens": 64, "custom_params": {"sparrow": option}}
        answer = engine.generate(PROMPT, sampling)
        print(answer["text"], answer["meta_info"]["sparrow"], sep="\n")
    engine.shutdown()


if __name__ == "__main__":  # the engine's processes import this file
    main()
