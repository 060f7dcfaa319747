"""Prompts of three model families in the words of all three endpoints, in front of two simulated workers: as `ownerserve serve` foresees
them, and as the worker that serves them counts and finds them, step by step."""

import urllib.error

import pytest
from harness.cluster import MODEL, Cluster, get_json
from harness.processes import ROOT
from harness.talk import post, prose
from harness.words import Chat, Messages, Responses, agrees, known_exactly, receipted, settled, step

STEPS = 7
BLOCK = 16
ADAPTER = "sql"
IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost/ship.png"}}


# Thoughts that are dropped later, a begin-of-text, and tools that move to the newest turn.
@pytest.fixture(scope="module", params=["qwen_like", "llama_like", "mistral_v7"])
def serve(request):
    folder = ROOT / "router/prefix/testdata/models" / request.param
    settings = (f'models.{MODEL}.tokenizer_dir="{folder}"', f'models.{MODEL}.lora_adapters=["{ADAPTER}"]', "prefix_cache.verify_every=1")
    sim = ("--tokenizer-dir", str(folder), "--lora-adapter", ADAPTER, "--speed-up", "20")
    with Cluster("hybrid", "hybrid", sim=sim, settings=settings) as cluster:
        known_exactly(cluster.serve)
        yield cluster.serve


def differences(serve) -> list[float]:
    """Prompts that were put together otherwise than as a whole."""
    return [serve.metric("prefix_verifications_total", outcome=outcome) for outcome in ("token_mismatch", "length_mismatch", "refused")]


@pytest.mark.parametrize("model", [MODEL, ADAPTER])
@pytest.mark.parametrize("words", [Chat, Messages, Responses])
def test_a_conversation_with_tools_is_known_as_its_worker_knows_it(serve, words, model):
    # Adapters share no blocks: the same conversation is new to each.
    talk, found = words(prose(150, 71), thoughts=True), []
    talk.ask(f"Where is the ship, {words.__name__}?")
    for number in range(STEPS):
        settled(serve)
        arguments = {"chat_template_kwargs": {"enable_thinking": False}}
        answer, receipt = step(serve, talk, model=model, prompt_cache_key=f"{words.__name__} {model}", **arguments)
        agrees(talk, answer, receipt, BLOCK)
        found.append(receipt["observed"]["cached_tokens"] or 0)
        if number % 3 == 2:
            talk.answered(answer)
            talk.ask(prose(30, 72 + number))
        else:
            talk.use(number, prose(40, 72 + number))
    assert all(found[1:]), found
    assert differences(serve) == [0, 0, 0]


def test_an_adapters_prompts_are_found_under_its_name_only(serve):
    talk, found = Chat(prose(250, 81)), []
    talk.ask(prose(40, 82))
    for model in (MODEL, ADAPTER, MODEL, ADAPTER):
        settled(serve)
        answer, receipt = step(serve, talk, model=model)
        agrees(talk, answer, receipt, BLOCK)
        found.append(receipt["observed"]["cached_tokens"] or 0)
    # A template's own first words and the tool may have been there.
    assert 2 * max(found[:2]) < min(found[2:]), found
    listed = get_json(f"{serve.url}/v1/models")["data"]
    assert [(entry["id"], entry["parent"]) for entry in listed] == [(MODEL, None), (ADAPTER, MODEL)]
    assert refusal(serve, Chat.path, {**talk.body(), "model": "csv"}) == 404


@pytest.mark.parametrize("more", [{}, {"add_special_tokens": False}])
def test_a_plain_prompt_is_framed_here_as_it_is_there(serve, more):
    for _ in range(2):
        settled(serve)
        answer, receipt = receipted(serve, "/v1/completions", {"prompt": prose(60, 91), "max_tokens": 4, **more})
        usage = answer["usage"]
        assert receipt["lookup"]["token_ids_unavailable"] is None
        assert receipt["lookup"]["prompt_tokens"] == usage["prompt_tokens"]
        assert receipt["observed"]["predicted_cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def refusal(serve, path: str, body: dict) -> int:
    with pytest.raises(urllib.error.HTTPError) as error:
        post(serve.url, path, {"model": MODEL, **body})
    return error.value.code


def test_what_contradicts_itself_or_is_no_text_is_refused(serve):
    begun = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "The"}]
    for generation in ({}, {"add_generation_prompt": True}):
        assert refusal(serve, Chat.path, {"messages": begun, "continue_final_message": True, **generation}) == 400
    gone_on = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 4}
    assert post(serve.url, Chat.path, {"model": MODEL, **gone_on})["usage"]["completion_tokens"] > 0
    assert refusal(serve, Chat.path, {"messages": [{"role": "user", "content": [IMAGE]}]}) == 400
