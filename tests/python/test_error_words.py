"""What goes wrong at OwnerServe itself, as the official clients of each API hear of it."""

import anthropic
import openai
import pytest
from harness.cluster import Cluster, Serve
from harness.recorder import Recorder

SAYS = [{"role": "user", "content": "Tell me everything."}]
ASK = {"model": "tiny", "messages": SAYS, "max_tokens": 8}
# Up to what is allowed, and not only to the end of what the model has to say.
ENDLESS = {"ignore_eos": True}


def claude(url: str, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=30)


def shape(error: anthropic.APIStatusError) -> str:
    """Checks Anthropic's error object; gives its type."""
    body = error.body
    assert body["type"] == "error" and body["error"]["message"], body
    assert body["request_id"].startswith("req-"), body
    return body["error"]["type"]


@pytest.fixture
def slow():
    """One worker whose streams, asked to go on, last long enough for it to be killed in the middle."""
    with Cluster("hybrid", sim=("--speed-up", "2")) as cluster:
        yield cluster


def killing(cluster, stream):
    """The stream's events; its worker dies after some."""
    for number, event in enumerate(stream):
        yield event
        if number == 6:
            cluster.workers[0].process.kill()


def test_a_message_is_answered_whole_and_streamed(cluster):
    with claude(cluster.url) as client:
        whole = client.messages.create(**ASK)
        with client.messages.stream(**ASK) as stream:
            text = "".join(stream.text_stream)
        assert whole.content[0].text and text
        assert client.messages.count_tokens(model="tiny", messages=SAYS).input_tokens > 0


@pytest.mark.parametrize("wrong, error, kind", [
    ({"model": "huge"}, anthropic.NotFoundError, "not_found_error"),
    ({"messages": "hello"}, anthropic.BadRequestError, "invalid_request_error"),
    ({"stream": "yes"}, anthropic.BadRequestError, "invalid_request_error"),
])
def test_anthropics_client_hears_of_a_refusal_in_its_words(cluster, wrong, error, kind):
    with claude(cluster.url) as client, pytest.raises(error) as raised:
        client.post("/v1/messages", body={**ASK, **wrong}, cast_to=object)
    assert shape(raised.value) == kind and raised.value.type == kind
    assert raised.value.request_id == raised.value.body["request_id"]


def test_other_paths_keep_openais_words(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        for call in (
            lambda: client.responses.create(model="huge", input="x"),
            lambda: client.chat.completions.create(model="huge", messages=SAYS),
        ):
            with pytest.raises(openai.NotFoundError) as raised:
                call()
            assert raised.value.code == "model_not_found"


def test_keys_quotas_and_sizes_are_told_in_anthropics_words(tmp_path):
    recorder = Recorder()
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys]\n"sk-right" = "team-a"\n')
    settings = (f'auth.keys_file="{keys}"', "tenants.team-a.requests_per_minute=1", "proxy.body_limit=10KB")
    serve = Serve([recorder.url], settings=settings).wait()
    try:
        with claude(serve.url, "sk-wrong") as client:
            count = {"model": "tiny", "messages": SAYS}
            for call in (lambda: client.messages.create(**ASK), lambda: client.messages.count_tokens(**count)):
                with pytest.raises(anthropic.AuthenticationError) as raised:
                    call()
                assert shape(raised.value) == "authentication_error"
        with claude(serve.url, "sk-right") as client:
            with pytest.raises(anthropic.RequestTooLargeError) as raised:
                client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "x" * 10_000}]})
            assert shape(raised.value) == "request_too_large"
            with pytest.raises(anthropic.RateLimitError) as raised:
                client.messages.create(**ASK)
            assert shape(raised.value) == "rate_limit_error"
            assert int(raised.value.response.headers["retry-after"]) > 0
        assert recorder.posts() == []
    finally:
        serve.stop()
        recorder.stop()


def test_a_worker_that_fails_is_told_in_the_words_of_each_path(recorded):
    recorder, serve = recorded
    recorder.behaviour.break_before_answer = True
    with claude(serve.url) as client, pytest.raises(anthropic.InternalServerError) as raised:
        client.messages.create(**ASK)
    # Whether it is the one that failed or the lack of another is a matter of when the loss is seen.
    assert shape(raised.value) in ("api_error", "overloaded_error")


def test_anthropics_client_raises_when_its_stream_breaks(slow):
    with claude(slow.url) as client:
        met = []
        with pytest.raises(anthropic.APIStatusError) as raised:
            stream = client.messages.create(**{**ASK, "max_tokens": 8000}, stream=True, extra_body=ENDLESS)
            met.extend(event.type for event in killing(slow, stream))
    assert met[0] == "message_start" and "content_block_delta" in met
    assert shape(raised.value) == "api_error" and "worker" in raised.value.body["error"]["message"]


@pytest.mark.parametrize("stored", [True, False])
def test_openais_client_raises_when_a_response_breaks(slow, stored):
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        met = []
        with pytest.raises(openai.APIError, match="worker") as raised:
            stream = client.responses.create(
                model="tiny", input="Tell me everything.", max_output_tokens=8000, stream=True, store=stored,
                extra_body=ENDLESS)
            for event in killing(slow, stream):
                met.append(event)
    assert raised.value.code == "worker_failed" and met[0].type == "response.created"
