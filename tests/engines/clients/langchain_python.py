"""LangChain's `ChatOpenAI` and `OpenAI`: chains, streams, bound tools, structured output and batches."""

from typing import Literal

from langchain_core.messages import ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from talk import URL, done, found

REACHED = {"model": "tiny", "base_url": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_retries": 0, "timeout": 120}
prompt = ChatPromptTemplate.from_messages([("system", "You help travellers."), ("user", "{question}")])


@tool
def weather(city: Literal["Oslo", "Lima", "Pune"], unit: Literal["celsius", "kelvin"]) -> str:
    """The weather somewhere."""
    return f"rain in {city}, 280 {unit}"


class Place(BaseModel):
    """Where it is."""

    city: Literal["Oslo", "Lima", "Pune"]


def conversation(llm, way: str) -> None:
    asked = prompt.invoke({"question": "Which gate is it?"})
    found(f"{way}: chat", llm.invoke(asked))
    joined, said = None, ""
    for chunk in llm.stream(asked):
        joined, said = chunk if joined is None else joined + chunk, said + chunk.text
    found(f"{way}: chat, streamed", [joined.content, said, joined.usage_metadata])
    bound = llm.bind_tools([weather], tool_choice="weather")
    call = bound.invoke(asked)
    found(f"{way}: a tool", [call.tool_calls, call.invalid_tool_calls, call.usage_metadata])
    joined = None
    for chunk in bound.stream(asked):
        joined = chunk if joined is None else joined + chunk
    found(f"{way}: a tool, streamed", [joined.tool_calls, joined.invalid_tool_calls])
    results = [ToolMessage(weather.invoke(one["args"]), tool_call_id=one["id"]) for one in call.tool_calls]
    found(f"{way}: after a tool", llm.invoke([*asked.messages, call, *results]))


llm = ChatOpenAI(**REACHED, max_tokens=60, stream_usage=True)
conversation(llm, "chat")
conversation(ChatOpenAI(**REACHED, max_tokens=60, use_responses_api=True), "responses")
found("structured", (prompt | llm.with_structured_output(Place, method="json_schema")).invoke({"question": "Where?"}))
found("several", [answer.content for answer in (prompt | llm).batch([{"question": text} for text in ("Who?", "When?", "Why?")])])
found("text", OpenAI(**REACHED, max_tokens=16).invoke("The gate is"))
done()
