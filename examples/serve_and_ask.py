"""Start a server with sparse decode, ask it one question, print the answer and what was read.

python serve_and_ask.py --model-path Qwen/Qwen3-4B     takes the flags of `sparrow serve`
"""

import inspect
import os
import subprocess
import sys
import textwrap

from openai import OpenAI

port = os.environ.get("PORT", "30000")
server = subprocess.Popen(["sparrow", "serve", "--port", port, *sys.argv[1:]])
try:
    # Asks again until the server is up.
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=60)
    question = f"{inspect.getsource(textwrap)[:6000]}\n\nWhat does this module do?"
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        extra_body={"custom_params": {"sparrow": {"report": True}}},
    )
    print(answer.choices[0].message.content, answer.metadata["sparrow"], sep="\n")
finally:
    server.terminate()
