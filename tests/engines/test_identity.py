"""Prompts in the words of all three endpoints, as `ownerserve serve` names them and as real vLLM counts and finds them, step by step."""

import json
import time
import urllib.request

import pytest

from engine import BLOCK
from harness.cluster import Serve, get_json
from harness.processes import until
from harness.talk import TEXT, prose

STEPS = 8
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}


class Chat:
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"

    def __init__(self, system: str):
        self.items = [{"role": "system", "content": system}]

    def body(self) -> dict:
        function = {"name": "look", "description": "Looks", "parameters": SCHEMA}
        return {"messages": self.items, "tools": [{"type": "function", "function": function}], "tool_choice": "none", "max_tokens": 12}

    def ask(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def use(self, number: int, result: str) -> None:
        call = {"id": f"call{number:05}", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}
        self.items.append({"role": "assistant", "content": f"Let me look {number}.", "tool_calls": [call]})
        self.items.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def answered(self, answer: dict) -> None:
        self.items.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "nothing"})

    @staticmethod
    def counted(answer: dict) -> tuple[int, int]:
        """Tokens of the prompt, and those of them that vLLM found."""
        usage = answer["usage"]
        return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


class Messages(Chat):
    """`/v1/messages`, as agents send it: a line that names the client and always changes, marks that wander."""

    path = "/v1/messages"

    def __init__(self, system: str):
        self.system, self.items, self.sent = system, [], 0

    def body(self) -> dict:
        self.sent += 1
        system = [{"type": "text", "text": f"x-anthropic-billing-header: {self.sent}"}, {"type": "text", "text": self.system}]
        items = json.loads(json.dumps(self.items))
        if isinstance(items[-1]["content"], list):
            items[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        return {"system": system, "messages": items, "tools": [{"name": "look", "description": "Looks", "input_schema": SCHEMA}],
                "tool_choice": {"type": "none"}, "max_tokens": 12}

    def ask(self, text: str) -> None:
        self.items.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def use(self, number: int, result: str) -> None:
        call = {"type": "tool_use", "id": f"call{number:05}", "name": "look", "input": {"at": "sea"}}
        self.items.append({"role": "assistant", "content": [{"type": "text", "text": f"Let me look {number}."}, call]})
        self.items.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": result}]})

    def answered(self, answer: dict) -> None:
        text = "".join(block.get("text") or "" for block in answer["content"])
        self.items.append({"role": "assistant", "content": [{"type": "text", "text": text or "nothing"}]})

    @staticmethod
    def counted(answer: dict) -> tuple[int, int]:
        usage = answer["usage"]
        cached = usage.get("cache_read_input_tokens") or 0
        return usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0), cached


class Responses(Chat):
    """`/v1/responses`."""

    path = "/v1/responses"

    def __init__(self, system: str):
        self.system, self.items = system, []

    def body(self) -> dict:
        tool = {"type": "function", "name": "look", "description": "Looks", "parameters": SCHEMA}
        return {"instructions": self.system, "input": self.items, "tools": [tool], "tool_choice": "none", "max_output_tokens": 12}

    def use(self, number: int, result: str) -> None:
        call = {"type": "function_call", "call_id": f"call{number:05}", "name": "look", "arguments": '{"at": "sea"}'}
        self.items.append({"role": "assistant", "content": f"Let me look {number}."})
        self.items.append(call)
        self.items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})

    def answered(self, answer: dict) -> None:
        self.items.extend(answer["output"])

    @staticmethod
    def counted(answer: dict) -> tuple[int, int]:
        usage = answer["usage"]
        return usage["input_tokens"], (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0


@pytest.fixture(scope="module")
def serve(engines):
    serve = Serve([f"{engines[0].url}#hybrid"], settings=(TEXT, "identity.look_every=1")).wait()
    try:
        until("every block is known", lambda: worker(serve)["knowledge"] == "exact")
        yield serve
    finally:
        serve.stop()


def worker(serve) -> dict:
    return get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"][0]


def settled(serve) -> None:
    """Once five looks in a row found that no event had come."""
    last, same = worker(serve)["events"]["batches"], 0
    while same < 5:
        time.sleep(0.02)
        now = worker(serve)["events"]["batches"]
        last, same = now, same + 1 if now == last else 0


def step(serve, talk: Chat, **more) -> tuple[dict, dict]:
    """The answer to the conversation so far, and its receipt."""
    body = {"model": "tiny", "temperature": 0, **talk.body(), **more}
    request = urllib.request.Request(serve.url + talk.path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as whole:
        answer, name = json.load(whole), whole.headers["x-request-id"]

    def receipt():
        receipt = get_json(f"{serve.operator}/ownerserve/v1/decisions/{name}")
        return receipt if receipt["seen"] else None

    return answer, until("its receipt", receipt)


def agrees(serve, talk: Chat, answer: dict, receipt: dict) -> str:
    """Checks that what was predicted is what vLLM counted; by what the prompt was recognised."""
    prompt, cached = talk.counted(answer)
    known, seen = receipt["known"], receipt["seen"]
    assert known["fallback"] is None, known
    assert known["prompt"] == prompt, f"{talk.path}: vLLM counted {prompt} tokens: {known}"
    # vLLM takes whole blocks, and never the last token, whose logits it needs.
    usable = min(known["deepest_overlap"], prompt - 1) // BLOCK * BLOCK
    assert cached == usable == seen["predicted_cached"] == (seen["cached"] or 0), f"{talk.path}: vLLM found {cached}: {receipt}"
    return known["rung"]


@pytest.mark.parametrize(("words", "seed"), [(Chat, 61), (Messages, 62), (Responses, 63)])
def test_a_conversation_in_any_endpoints_words_is_known_as_vllm_knows_it(serve, words, seed):
    talk, rungs, found = words(prose(300, seed)), [], 0
    talk.ask("Where is the ship?")
    for number in range(STEPS):
        settled(serve)
        answer, receipt = step(serve, talk, prompt_cache_key=f"{words.__name__} {seed}")
        rungs.append(agrees(serve, talk, answer, receipt))
        found += receipt["seen"]["cached"] or 0
        if number % 3 == 2:
            talk.answered(answer)
            talk.ask(prose(40, seed + number))
        else:
            talk.use(number, prose(60, seed + number))
    assert rungs == ["cold"] + ["session"] * (STEPS - 1), rungs
    assert found > 1000, "hardly anything was found again"
    assert [serve.metric("identity_looks_total", outcome=wrong) for wrong in ("tokens", "length", "refused")] == [0, 0, 0]


def test_a_response_is_gone_on_with_by_its_transcript_as_vllm_knows_it(serve):
    talk = Responses(prose(200, 64))
    talk.ask(prose(200, 65))
    answer, receipt = step(serve, talk)
    agrees(serve, talk, answer, receipt)
    for number in range(3):
        previous = answer["id"]
        settled(serve)
        talk.items = [{"role": "user", "content": prose(50, 66 + number)}]
        answer, receipt = step(serve, talk, previous_response_id=previous)
        agrees(serve, talk, answer, receipt)
        assert (receipt["seen"]["cached"] or 0) > 0, "the conversation before was found"
