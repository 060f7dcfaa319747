"""The official `anthropic` package, against `/v1/messages`."""

import anthropic

from talk import PLACE, URL, done, found

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=120)
ASK = {"model": "tiny", "max_tokens": 24, "extra_body": {"temperature": 0}, "system": "You help travellers.",
       "messages": [{"role": "user", "content": "Which gate is it?"}]}
TOOLS = [{"name": "weather", "description": "The weather somewhere.", "input_schema": PLACE}]
FORCED = {"max_tokens": 60, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}


def streamed(name: str, **ask) -> None:
    text, arguments, kinds = "", "", set()
    with client.messages.stream(**ASK | ask) as stream:
        for event in stream:
            kinds.add(event.type)
            if event.type == "text":
                text += event.text
            elif event.type == "input_json":
                arguments += event.partial_json
        found(name, [stream.get_final_message(), text, arguments, sorted(kinds)])


found("models", [model.id for model in client.models.list()])
found("message", client.messages.create(**ASK))
found("in blocks", client.messages.create(**ASK | {"messages": [
    {"role": "user", "content": [{"type": "text", "text": "Which "}, {"type": "text", "text": "gate?"}]}]}))
found("stopped", client.messages.create(**ASK, stop_sequences=["a"]))
found("counted", client.messages.count_tokens(model="tiny", system=ASK["system"], messages=ASK["messages"]))
streamed("message, streamed")
first = client.messages.create(**ASK | FORCED)
found("a tool", first)
streamed("a tool, streamed", **FORCED)
used = next(block for block in first.content if block.type == "tool_use")
result = {"type": "tool_result", "tool_use_id": used.id, "content": "rain"}
found("after a tool", client.messages.create(**ASK | {"messages": [
    *ASK["messages"], {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]}, tools=TOOLS,
    tool_choice={"type": "none"}))
for name, wrong in {"an unknown model": {"model": "huge"}, "a wrong role": {"messages": [{"role": "nobody", "content": "x"}]}}.items():
    try:
        client.messages.create(**ASK | wrong)
        found(name, "nothing")
    except anthropic.APIStatusError as error:
        found(name, [type(error).__name__, error.status_code])
done()
