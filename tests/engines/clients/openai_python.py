"""The official `openai` package for Python."""

from typing import Literal

import openai
from pydantic import BaseModel

from talk import QUESTION, SEATS, URL, WEATHER, done, found

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
CHAT = {"model": "tiny", "messages": QUESTION, "max_tokens": 24, "temperature": 0}


class Place(BaseModel):
    city: Literal["Oslo", "Lima", "Pune"]
    unit: Literal["celsius", "kelvin"]


def streamed(name: str, **ask) -> None:
    """All deltas of a kind joined, and what comes once."""
    text, arguments, last, logprobs = "", "", [], []
    for chunk in client.chat.completions.create(**{**CHAT, "stream_options": {"include_usage": True}, **ask}, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            arguments += "".join(call.function.arguments or "" for call in choice.delta.tool_calls or [])
            last += [choice.finish_reason] if choice.finish_reason else []
            logprobs += choice.logprobs.content if choice.logprobs else []
        last += [chunk.usage] if chunk.usage else []
    found(name, [text, arguments, last, logprobs])


def accumulated(name: str, **ask) -> None:
    """The final object that the client makes of a stream."""
    with client.chat.completions.stream(**CHAT | ask) as stream:
        kinds = sorted({event.type for event in stream})
        found(name, [stream.get_final_completion(), kinds])


def chats() -> None:
    found("models", [model.id for model in client.models.list()])
    found("chat", client.chat.completions.create(**CHAT))
    found("seeded", client.chat.completions.create(**CHAT | {"temperature": 0.9, "seed": 11, "top_p": 0.8}))
    found("two answers", client.chat.completions.create(**CHAT | {"temperature": 0.9, "seed": 12}, n=2))
    found("log probabilities", client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3))
    found("stopped", client.chat.completions.create(**CHAT, stop=["a"]))
    streamed("chat, streamed")
    streamed("log probabilities, streamed", logprobs=True, top_logprobs=2)


def tools() -> None:
    tools = [WEATHER, SEATS]
    named = {"type": "function", "function": {"name": "weather"}}
    first = client.chat.completions.create(**CHAT | {"max_tokens": 60}, tools=tools, tool_choice=named)
    found("a named tool", first)
    one = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    found("any tool", client.chat.completions.create(**CHAT | one))
    streamed("a named tool, streamed", tools=tools, tool_choice=named, max_tokens=60)
    streamed("any tool, streamed", **one)
    call = first.choices[0].message.tool_calls[0]
    then = [*QUESTION, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    found("after a tool", client.chat.completions.create(**CHAT | {"messages": then}, tools=tools, tool_choice="none"))
    accumulated("a named tool, accumulated", tools=tools, tool_choice=named, max_tokens=60)
    accumulated("parsed, accumulated", response_format=Place, max_tokens=60)
    found("parsed", client.chat.completions.parse(**CHAT | {"max_tokens": 60}, response_format=Place))


def texts() -> None:
    ask = {"model": "tiny", "prompt": "The flight leaves at", "max_tokens": 20, "temperature": 0}
    found("completion", client.completions.create(**ask, logprobs=2))
    found("echoed", client.completions.create(**ask, echo=True))
    found("several prompts", client.completions.create(**ask | {"prompt": ["The gate is", "The seat is"]}))
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    texts = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    found("completion, streamed", [texts, finishes, chunks[-1].usage])


def responses() -> None:
    ask = {"model": "tiny", "input": "Which gate is it?", "instructions": "Be brief.", "max_output_tokens": 20, "temperature": 0}
    found("response", client.responses.create(**ask))
    kinds, text = set(), ""
    for event in client.responses.create(**ask, stream=True):
        kinds.add(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
        if event.type == "response.completed":
            final = event.response
    found("response, streamed", [final, text, sorted(kinds)])
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    found("a response's tool", client.responses.create(
        **ask | {"max_output_tokens": 60}, tools=[tool], tool_choice={"type": "function", "name": "weather"}))


def refusals() -> None:
    for name, ask in {
        "an unknown model": {"model": "huge"}, "a wrong type": {"temperature": "hot"}, "too hot": {"temperature": 7},
        "too long": {"max_tokens": 1_000_000},
    }.items():
        try:
            client.chat.completions.create(**CHAT | ask)
            found(name, "nothing")
        except openai.APIStatusError as error:
            found(name, [type(error).__name__, error.status_code])


chats()
tools()
texts()
responses()
refusals()
done()
