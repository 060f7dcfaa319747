"""The official `openai` and `litellm` packages, unchanged, in front of simulated workers."""

import asyncio

import litellm
import openai
import pytest
from harness.cluster import Serve
from harness.recorder import Recorder, completion
from harness.wire import exchange

QUESTION = [{"role": "system", "content": "You help travellers."}, {"role": "user", "content": "Which gate is it?"}]
WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "The weather somewhere.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


@pytest.fixture(scope="module")
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def lite(cluster, **more):
    return litellm.completion(
        api_base=f"{cluster.url}/v1", api_key="none", num_retries=0, timeout=30,
        **{"model": "openai/tiny", "messages": QUESTION, "max_tokens": 8, **more})


def test_a_chat_is_answered_whole_and_counted(client):
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8, temperature=0)
    assert answer.model == "tiny" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert 0 < answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_says_the_same_as_a_whole_one(client):
    ask = {"model": "tiny", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert text == whole.choices[0].message.content
    assert finishes == [whole.choices[0].finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_usage_is_not_sent_to_who_did_not_ask_for_it(client):
    stream = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4, stream=True)
    assert all(chunk.usage is None for chunk in stream)


def test_completions_answer_whole_and_streamed(client):
    ask = {"model": "tiny", "prompt": "The flight leaves at", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**ask)
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True) if chunk.choices)
    assert text == whole.choices[0].text and text


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")


def test_a_conversation_goes_on_from_its_own_answers(client):
    messages = list(QUESTION)
    for turn in range(4):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=16, temperature=0, extra_headers={"x-session-id": "talk-1"})
        messages += [{"role": "assistant", "content": answer.choices[0].message.content},
                     {"role": "user", "content": f"And then, {turn}?"}]
    assert answer.usage.prompt_tokens > 40


def test_a_chat_with_tools_is_served(client):
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, tools=[WEATHER], max_tokens=8, temperature=0)
    plain = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8, temperature=0)
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens


def test_many_clients_at_once_are_all_served(cluster):
    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            def ask(number):
                return client.chat.completions.create(
                    model="tiny", max_tokens=8, temperature=0,
                    messages=[{"role": "user", "content": f"Question {number} of many."}])
            return await asyncio.gather(*(ask(number) for number in range(40)))

    assert all(answer.choices[0].message.content for answer in asyncio.run(all_at_once()))


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="huge", messages=QUESTION)
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize("wrong", [
    {"messages": "hello"}, {"messages": [1]}, {"temperature": "hot"}, {"max_tokens": "many"}, {"stream": "yes"},
    {"model": 7}, {"messages": []},
])
def test_wrong_types_are_bad_requests(client, wrong):
    ask = {"model": "tiny", "messages": QUESTION, "max_tokens": 4, **wrong}
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/chat/completions", body=ask, cast_to=object)
    assert error.value.body["message"]


def test_a_prompt_beyond_the_context_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="word " * 200_000, max_tokens=4)


def test_keys_decide_who_is_let_in(tmp_path):
    recorder = Recorder()
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys]\n"sk-right" = "team-a"\n')
    serve = Serve([recorder.url], settings=(f'auth.keys_file="{keys}"',)).wait()
    try:
        for key in ("sk-wrong", "sk-righ", "Bearer"):
            wrong = openai.OpenAI(base_url=f"{serve.url}/v1", api_key=key, max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                wrong.chat.completions.create(model="tiny", messages=QUESTION)
            with pytest.raises(openai.AuthenticationError):
                wrong.models.list()
            with pytest.raises(litellm.AuthenticationError):
                litellm.completion(
                    model="openai/tiny", api_base=f"{serve.url}/v1", api_key=key, messages=QUESTION, num_retries=0)
        assert exchange(serve.port, b"{}").status == 401
        assert recorder.posts() == []
        right = openai.OpenAI(base_url=f"{serve.url}/v1", api_key="sk-right", max_retries=0)
        assert right.chat.completions.create(model="tiny", messages=QUESTION).choices[0].message.content == "recorded"
        assert "sk-right" not in serve.process.log.read_text()
    finally:
        serve.stop()
        recorder.stop()


def test_tool_calls_reach_the_client_as_the_engine_made_them(recorded):
    recorder, serve = recorded
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    answer = completion()
    answer["choices"][0] = {"index": 0, "finish_reason": "tool_calls",
                            "message": {"role": "assistant", "content": None, "tool_calls": [call]}}
    recorder.behaviour.answer = answer
    client = openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=0)
    got = client.chat.completions.create(model="tiny", messages=QUESTION, tools=[WEATHER])
    assert got.choices[0].message.tool_calls[0].function.arguments == '{"city": "Oslo"}'


def test_an_engines_own_errors_keep_their_class(recorded):
    recorder, serve = recorded
    client = openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=0)
    recorder.behaviour.status = 422
    recorder.behaviour.answer = {"error": {"message": "no such tool", "type": "invalid_request_error", "code": 422}}
    with pytest.raises(openai.UnprocessableEntityError, match="no such tool"):
        client.chat.completions.create(model="tiny", messages=QUESTION)
    assert len(recorder.posts()) == 1, "a client's mistake was tried again"


def test_litellm_chats_whole_and_streamed(cluster):
    whole = lite(cluster, temperature=0)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in lite(cluster, temperature=0, stream=True))
    assert text == whole.choices[0].message.content and text


def test_litellm_completes_text(cluster):
    answer = litellm.text_completion(
        model="text-completion-openai/tiny", prompt="The gate is", max_tokens=6, api_base=f"{cluster.url}/v1",
        api_key="none", num_retries=0)
    assert answer.choices[0].text


def test_litellm_raises_the_right_classes(cluster):
    with pytest.raises(litellm.NotFoundError):
        lite(cluster, model="openai/huge")
    with pytest.raises(litellm.BadRequestError):
        lite(cluster, temperature="hot")
