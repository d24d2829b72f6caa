"""Tasks of several turns: what follows a turn, token by token, and the calculator."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from transformers import AddedToken, AutoTokenizer

from sparrow_sglang.models import model_folder
from sparrow_sglang.rl.config import TaskConfig
from sparrow_sglang.rl.metrics import kv_metrics, prefill_metrics
from sparrow_sglang.rl.tasks import ChatRender, calculator, load_task
from sparrow_sglang.rl.turns import Environment
from sparrow_sglang.rl.types import Group, Prompt, Rollout, Segment
from sparrow_sglang.schedule import BudgetSchedule


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_folder("smollm2-135m"))


QUESTION = {"role": "user", "content": "What is 2 * 3?"}
TOOL = {"role": "user", "content": "6"}
ENVIRONMENT = Environment({"test": lambda prompt, turns: TOOL})


def turn_of(tokenizer, text: str, ended: bool = True) -> Rollout:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ids += [tokenizer.eos_token_id] if ended else []
    prompt = ChatRender(tokenizer)([QUESTION])
    reason = "stop" if ended else "length"
    return Rollout("0", 0, prompt, tuple(ids), np.zeros(len(ids)), reason, "0", "s", text)


def prompt_of(rollout: Rollout) -> Prompt:
    return Prompt("0", "test", rollout.prompt_ids, {"answer": 6, "calls": 1})


def test_the_next_turn_sees_what_the_template_would_render(tokenizer) -> None:
    said = "I ask <calculator>2 * 3</calculator>"
    rollout = turn_of(tokenizer, said)
    more = ENVIRONMENT.answered(rollout, prompt_of(rollout), tokenizer, 100)
    assert more.response_ids[: len(rollout.response_ids)] == rollout.response_ids
    whole = ChatRender(tokenizer)([QUESTION, {"role": "assistant", "content": said}, TOOL])
    assert more.prompt_ids + more.response_ids == whole
    assert (more.finished, more.turns, more.segments) == (False, (said, ""), rollout.segments)


def test_a_turn_is_ended_once_by_a_token_without_a_role(tokenizer) -> None:
    """Gemma's <end_of_turn> and the first Llama 3's <|eot_id|> are such tokens."""
    other = copy.deepcopy(tokenizer)
    other.add_tokens([AddedToken("<|turn|>", special=True)])
    end = other.convert_tokens_to_ids("<|turn|>")
    other.chat_template = other.chat_template.replace("<|im_end|>", "<|turn|>")
    open_turn = turn_of(other, "6", ended=False)
    rollout = replace(
        open_turn,
        response_ids=(*open_turn.response_ids, end),
        logprobs=np.append(open_turn.logprobs, 0),
        finish_reason="stop",
        segments=(),
    )
    more = ENVIRONMENT.answered(rollout, prompt_of(rollout), other, 100)
    said = {"role": "assistant", "content": "6"}
    assert more.prompt_ids + more.response_ids == ChatRender(other)([QUESTION, said, TOOL])


def test_a_response_ends_where_nothing_follows(tokenizer, warnings) -> None:
    rollout = turn_of(tokenizer, "6")
    calls = []

    def answered(reply, limit: int = 100, rollout: Rollout = rollout) -> Rollout:
        return Environment({"test": reply}).answered(rollout, prompt_of(rollout), tokenizer, limit)

    assert answered(lambda prompt, turns: calls.append(turns)) is rollout and calls == [("6",)]
    cut = turn_of(tokenizer, "6", ended=False)
    assert answered(lambda prompt, turns: TOOL, rollout=cut) is cut
    assert Environment({}).answered(rollout, prompt_of(rollout), tokenizer, 100) is rollout
    # The answer would leave no room for a turn.
    given = len(answered(lambda prompt, turns: TOOL).response_ids)
    full = answered(lambda prompt, turns: TOOL, limit=given)
    assert (full.response_ids, full.finish_reason) == (rollout.response_ids, "length")
    assert not answered(lambda prompt, turns: TOOL, limit=given + 1).finished
    assert answered(lambda prompt, turns: 1 / 0) is rollout
    assert "test/0: reply: ZeroDivisionError" in warnings.text
    for wrong in ("6", {"content": "6"}, 6):
        assert answered(lambda prompt, turns, wrong=wrong: wrong) is rollout


def two_turns() -> Rollout:
    segments = (Segment(0, 20, "0", "s"), Segment(20, 30, "1", "s", 64), Segment(40, 45, "1", "s"))
    ids, logprobs = tuple(range(45)), -np.arange(35.0)
    return Rollout("0", 0, (9,) * 60, ids, logprobs, "stop", "1", "s", "b", segments, ("a",))


def test_a_lower_limit_cuts_a_response_where_it_had_been_cut_before_the_answer(tokenizer) -> None:
    rollout = turn_of(tokenizer, "I ask <calculator>2 * 3</calculator>")
    length = len(rollout.response_ids)
    answered = ENVIRONMENT.answered(rollout, prompt_of(rollout), tokenizer, 100)
    full = ENVIRONMENT.answered(rollout, prompt_of(rollout), tokenizer, length + 1)
    cut = answered.cut(length + 1)
    for one in (cut, full):
        assert (one.response_ids, one.turns) == (rollout.response_ids, rollout.turns)
        assert one.finish_reason == "length"
    assert answered.cut(100) is answered and rollout.cut(1) is rollout


def test_given_tokens_are_context_and_nothing_else() -> None:
    rollout = two_turns()
    ids = rollout.response_ids
    assert rollout.parts == (rollout.prompt_ids, ids[:30], ids[30:40], ids[40:])
    assert [len(context) for context, _ in rollout.split()] == [60, 80, 100]
    assert Group(prompt_of(rollout), (rollout, rollout)).tokens == 70
    with pytest.raises(ValueError, match="35 sampled tokens"):
        replace(rollout, logprobs=np.zeros(45))
    cached = [*range(61, 80), *range(81, 90), *range(101, 105)]
    metrics = kv_metrics([rollout], {"s": BudgetSchedule.fixed(64)})
    assert metrics["sparrow/kv_tokens_cached"] == pytest.approx(np.mean(cached))
    assert prefill_metrics([rollout]) == {
        "sparrow/turns": 2.0,
        "sparrow/continued_cached_tokens": 32.0,
        "sparrow/continued_prefilled_tokens": (16 + 100) / 2,
    }


def test_the_calculator_evaluates_integers_only() -> None:
    assert calculator.evaluate(" (12 + -7) * 100 - 3\n") == 497
    for wrong in ("2 ** 9", "abs(1)", "1 / 2", "1.5 + 1", "True + 1", "9" * 201, "(", "__import__"):
        with pytest.raises((ValueError, SyntaxError)):
            calculator.evaluate(wrong)


def test_the_calculator_answers_so_many_calls_and_the_last_turn_counts(tokenizer) -> None:
    task = load_task(
        TaskConfig(name="calculator", options={"train": 3, "heldout": 2, "calls": 1}),
        ChatRender(tokenizer),
    )
    assert (len(task.train), len(task.heldout)) == (3, 2)
    prompt = task.train[0]
    question = tokenizer.decode(prompt.input_ids)
    expression = question.split("What is ")[1].split("?")[0]
    call = f"<calculator>{expression}</calculator>"
    value = str(prompt.payload["answer"])
    assert task.reply(prompt, (call,)) == {"role": "user", "content": value}
    assert task.reply(prompt, (call, call)) is None and task.reply(prompt, ("none",)) is None
    assert "error" in task.reply(prompt, ("<calculator>2 ** 9</calculator>",))["content"]
    assert task.reward(prompt, f"So. Answer: {value}") == 1.0
    # A value without "Answer:", a wrong value and several answers earn nothing.
    for text in (value, f"Answer: {value}1", f"Answer: {value} or Answer: 1", ""):
        assert task.reward(prompt, text) == 0.0
