"""Conversations with a tool in the words of each endpoint, and what the router knew of their prompts beside what the engine counted."""

import json
import time
import urllib.request

from .cluster import MODEL, get_json
from .processes import until

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}


class Chat:
    """`/v1/chat/completions`. With `thoughts`, the assistant tells what it thought before it used the tool."""

    path = "/v1/chat/completions"

    def __init__(self, system: str, thoughts: bool = False):
        self.system, self.thoughts, self.items, self.sent = system, thoughts, [], 0

    def body(self) -> dict:
        function = {"name": "look", "description": "Looks", "parameters": SCHEMA}
        return {"messages": [{"role": "system", "content": self.system}, *self.items],
                "tools": [{"type": "function", "function": function}], "tool_choice": "none", "max_tokens": 12}

    def ask(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def use(self, number: int, result: str) -> None:
        call = {"id": f"call{number:05}", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}
        thought = {"reasoning_content": f"I look {number}."} if self.thoughts else {}
        self.items.append({"role": "assistant", "content": f"Let me look {number}.", "tool_calls": [call], **thought})
        self.items.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def answered(self, answer: dict) -> None:
        self.items.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "nothing"})

    @staticmethod
    def counted(answer: dict) -> tuple[int, int]:
        """Tokens of the prompt, and those of them that the engine found."""
        usage = answer["usage"]
        return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


class Messages(Chat):
    """`/v1/messages`, as agents send it: a line that names the client and always changes, marks that wander."""

    path = "/v1/messages"

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
        thought = [{"type": "thinking", "thinking": f"I look {number}.", "signature": ""}] if self.thoughts else []
        self.items.append({"role": "assistant", "content": [*thought, {"type": "text", "text": f"Let me look {number}."}, call]})
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

    def body(self) -> dict:
        tool = {"type": "function", "name": "look", "description": "Looks", "parameters": SCHEMA}
        return {"instructions": self.system, "input": self.items, "tools": [tool], "tool_choice": "none", "max_output_tokens": 12}

    def use(self, number: int, result: str) -> None:
        call = {"type": "function_call", "call_id": f"call{number:05}", "name": "look", "arguments": '{"at": "sea"}'}
        if self.thoughts:
            thought = {"type": "reasoning_text", "text": f"I look {number}."}
            self.items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": [thought]})
        self.items.append({"role": "assistant", "content": f"Let me look {number}."})
        self.items.append(call)
        self.items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})

    def answered(self, answer: dict) -> None:
        self.items.extend(answer["output"])

    @staticmethod
    def counted(answer: dict) -> tuple[int, int]:
        usage = answer["usage"]
        return usage["input_tokens"], (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0


def workers(serve) -> list[dict]:
    return get_json(f"{serve.operator}/ownerserve/v1/workers")["workers"]


def known_exactly(serve) -> None:
    """Until every block of every worker is known."""
    until("every block is known", lambda: all(worker["kv_index_state"] == "exact" for worker in workers(serve)))


def settled(serve) -> None:
    """Once five looks in a row found that no event had come."""

    def heard() -> list[int]:
        return [worker["kv_event_counts"]["batches"] for worker in workers(serve)]

    last, same = heard(), 0
    while same < 5:
        time.sleep(0.02)
        now = heard()
        last, same = now, same + 1 if now == last else 0


def step(serve, talk: Chat, **more) -> tuple[dict, dict]:
    """The answer to the conversation so far, and its receipt."""
    return receipted(serve, talk.path, {**talk.body(), **more})


def receipted(serve, path: str, body: dict) -> tuple[dict, dict]:
    """The answer to a request, and its receipt."""
    body = {"model": MODEL, "temperature": 0, **body}
    request = urllib.request.Request(serve.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as whole:
        answer, name = json.load(whole), whole.headers["x-request-id"]

    def receipt():
        receipt = get_json(f"{serve.operator}/ownerserve/v1/decisions/{name}")
        return receipt if receipt["observed"] else None

    return answer, until("its receipt", receipt)


def agrees(talk: Chat, answer: dict, receipt: dict, block: int) -> str | None:
    """Checks that what was predicted is what the engine counted, with blocks of so many tokens; by what the prompt was recognised."""
    prompt, cached = talk.counted(answer)
    known, seen = receipt["lookup"], receipt["observed"]
    assert known["token_ids_unavailable"] is None, known
    assert known["prompt_tokens"] == prompt, f"{talk.path}: the engine counted {prompt} tokens: {known}"
    # vLLM takes whole blocks, and never the last token, whose logits it needs.
    usable = min(known["max_overlap_tokens"], prompt - 1) // block * block
    assert cached == usable == seen["predicted_cached_tokens"] == (seen["cached_tokens"] or 0), f"{talk.path}: the engine found {cached}: {receipt}"
    return known["tier"]
