"""`litellm`, in OpenAI's words and in Anthropic's."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # noqa: E402

from talk import QUESTION, URL, WEATHER, done, found  # noqa: E402

litellm.telemetry = False
litellm.suppress_debug_info = True
WAYS = {"openai": {"model": "openai/tiny", "api_base": f"{URL}/v1"}, "anthropic": {"model": "anthropic/tiny", "api_base": URL}}
FORCED = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 60}

for way, reached in WAYS.items():
    ask = {"messages": QUESTION, "max_tokens": 24, "temperature": 0, "api_key": "none", "num_retries": 0, "timeout": 120, **reached}
    found(f"{way}: chat", litellm.completion(**ask))
    found(f"{way}: a tool", litellm.completion(**ask | FORCED))
    for name, more in {"chat": {}, "a tool": FORCED}.items():
        chunks = list(litellm.completion(**ask | more, stream=True, stream_options={"include_usage": True}))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        found(f"{way}: {name}, streamed", [litellm.stream_chunk_builder(chunks, messages=QUESTION), said])
    try:
        litellm.completion(**ask | {"model": f"{way}/huge"})
    except Exception as error:
        found(f"{way}: an unknown model", type(error).__name__)
found("text", litellm.text_completion(
    model="text-completion-openai/tiny", prompt="The gate is", max_tokens=12, temperature=0, api_base=f"{URL}/v1", api_key="none"))
done()
