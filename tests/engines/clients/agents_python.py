"""`openai-agents`: an agent that must call a tool in each step, hands over to another one, and that one's structured answer."""

import asyncio
from typing import Literal

from agents import (Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunContextWrapper, Runner, function_tool,
                    handoff, set_tracing_disabled)
from openai import AsyncOpenAI
from pydantic import BaseModel

from talk import URL, done, found

set_tracing_disabled(True)
City = Literal["Oslo", "Lima", "Pune"]
FORCED = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=120)


class Trip(BaseModel):
    """What was booked."""

    city: City
    rating: Literal["good", "bad"]


def at(step: int):
    """A tool that is there in this step only: forced calls then make a task of known length."""
    return lambda context, _agent: len(context.context) == step


@function_tool(is_enabled=at(0))
def search(context: RunContextWrapper[list], city: City, cabin: Literal["economy", "business"]) -> str:
    """Flights to a city."""
    context.context.append(f"search {city} {cabin}")
    return f"KL12 to {city} in {cabin} at 9, KL14 at 17"


@function_tool(is_enabled=at(1))
def reserve(context: RunContextWrapper[list], flight: Literal["KL12", "KL14"], seats: Literal[1, 2, 3]) -> str:
    """Takes seats."""
    context.context.append(f"reserve {seats} in {flight}")
    return f"{seats} seats in {flight} are kept for ten minutes"


@function_tool(is_enabled=at(2))
def pay(context: RunContextWrapper[list], method: Literal["card", "invoice"]) -> str:
    """Pays."""
    context.context.append(f"pay by {method}")
    return "paid"


def agent(model) -> Agent:
    writer = Agent(name="Writer", instructions="Say what was booked.", model=model, output_type=Trip,
                   model_settings=ModelSettings(temperature=0, max_tokens=60))
    return Agent(name="Booker", instructions="Book a trip.", model=model, tools=[search, reserve, pay], model_settings=FORCED,
                 handoffs=[handoff(writer, is_enabled=at(3))], reset_tool_choice=False)


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for way, make in {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}.items():
            booker, calls = agent(make("tiny", client)), []
            ended = await Runner.run(booker, "A trip for my aunt, please.", context=calls, max_turns=8)
            assert len(calls) == 3, calls
            found(f"{way}: task", [calls, ended.final_output, ended.to_input_list(), ended.context_wrapper.usage.total_tokens])
            calls = []
            stream = Runner.run_streamed(booker, "A trip for my uncle, please.", context=calls, max_turns=8)
            text = "".join([event.data.delta async for event in stream.stream_events()
                            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"])
            assert len(calls) == 3, calls
            found(f"{way}: task, streamed", [calls, stream.final_output, stream.to_input_list(), text])


asyncio.run(main())
done()
