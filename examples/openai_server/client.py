"""What a server offers to the official openai client, which reads OPENAI_BASE_URL and _API_KEY."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pydoc_data.topics import topics
from typing import Any

import openai

QUESTION = [{"role": "user", "content": "Name three colours."}]
# English that comes with every Python, some 600 tokens: longer than the budgets asked for below.
READING = f"{topics['while']}\n{topics['for']}\nIn short, the while statement"


def chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=24, temperature=0
    )
    print("chat:", answer.choices[0].message.content)


def stream(client: openai.OpenAI, model: str) -> None:
    print("stream:", end=" ")
    chunks = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=24, temperature=0, stream=True
    )
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    print()


def complete(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model,
        prompt="The capital of France is",
        max_tokens=12,
        n=2,
        logprobs=1,
        stop=["."],
        temperature=0.7,
    )
    for choice in answer.choices:
        logprob = sum(choice.logprobs.token_logprobs) if choice.logprobs else float("nan")
        print(f"completion {choice.index}: {choice.text!r}, log-prob {logprob:.2f}")


def budgets(client: openai.OpenAI, model: str) -> None:
    """Send one prompt at once under the server's default, densely, and with a smaller KV budget."""
    options: list[dict[str, Any]] = [{}, {"dense": True}, {"kv_budget_tokens": 128}]

    def ask(option: dict[str, Any]) -> str:
        answer = client.completions.create(
            model=model,
            prompt=READING,
            max_tokens=16,
            temperature=0,
            extra_body={"custom_params": {"sparrow": option | {"report": True}}},
        )
        [used] = answer.metadata["sparrow"]  # type: ignore[attr-defined]
        return (
            f"{option or 'default'}: schedule {used['schedule']}, KV tokens read"
            f" {used['kv_tokens_read_mean']:.0f} of {used['kv_tokens_cached_mean']:.0f}:"
            f" {answer.choices[0].text!r}"
        )

    with ThreadPoolExecutor() as pool:
        for line in pool.map(ask, options):
            print(line)


def adapters(client: openai.OpenAI, model: str) -> None:
    """An adapter that the server has loaded is a model of its own."""
    for adapter in [listed.id for listed in client.models.list()][1:]:
        chat(client, f"{model}:{adapter}")


def wrong(client: openai.OpenAI, model: str) -> None:
    try:
        client.completions.create(
            model=model,
            prompt="The capital of France is",
            extra_body={"custom_params": {"sparrow": {"kv_budget_tokens": 100}}},
        )
    except openai.BadRequestError as error:
        print("refused:", error)


def main() -> int:
    client = openai.OpenAI(timeout=600)
    model = next(iter(client.models.list())).id
    print("model:", model)
    for show in (chat, stream, complete, budgets, adapters, wrong):
        show(client, model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
