"""Prompts in the words of all three endpoints, as `ownerserve serve` names them and as real vLLM counts and finds them, step by step."""

import pytest

from engine import BLOCK
from harness.cluster import Serve
from harness.talk import TEXT, prose
from harness.words import Chat, Messages, Responses, agrees, known_exactly, receipted, settled, step

STEPS = 8


@pytest.fixture(scope="module")
def serve(engines):
    serve = Serve([f"{engines[0].url}#hybrid"], settings=(TEXT, "prefix_cache.verify_every=1")).wait()
    try:
        known_exactly(serve)
        yield serve
    finally:
        serve.stop()


@pytest.mark.parametrize(("words", "seed"), [(Chat, 61), (Messages, 62), (Responses, 63)])
def test_a_conversation_in_any_endpoints_words_is_known_as_vllm_knows_it(serve, words, seed):
    talk, rungs, found = words(prose(300, seed)), [], 0
    talk.ask("Where is the ship?")
    for number in range(STEPS):
        settled(serve)
        answer, receipt = step(serve, talk, prompt_cache_key=f"{words.__name__} {seed}")
        rungs.append(agrees(talk, answer, receipt, BLOCK))
        found += receipt["observed"]["cached_tokens"] or 0
        if number % 3 == 2:
            talk.answered(answer)
            talk.ask(prose(40, seed + number))
        else:
            talk.use(number, prose(60, seed + number))
    assert rungs == ["miss"] + ["session"] * (STEPS - 1), rungs
    assert found > 1000, "hardly anything was found again"
    assert [serve.metric("prefix_verifications_total", outcome=wrong) for wrong in ("token_mismatch", "length_mismatch", "refused")] == [0, 0, 0]


@pytest.mark.parametrize(("path", "ask", "also"), [
    ("/v1/completions", {"prompt": prose(200, 71)}, {"echo": True, "logprobs": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": prose(200, 72)}]}, {"echo": True}),
])
def test_log_probabilities_of_a_prompt_have_all_of_it_computed_and_nothing_else_is_predicted(serve, path, ask, also):
    def cached(**fields):
        settled(serve)
        receipt = receipted(serve, path, {**ask, "max_tokens": 2, **fields})[1]
        assert receipt["observed"]["predicted_cached_tokens"] == receipt["observed"]["cached_tokens"], (fields, receipt)
        return receipt["observed"]["cached_tokens"], receipt["lookup"]["evidence"].get("cache_not_readable")

    assert cached() == (0, None)
    found, why = cached()
    assert found >= 5 * BLOCK and why is None
    for fields in ({"prompt_logprobs": 1}, {"prompt_logprobs": 0}, also):
        assert cached(**fields) == (0, "prompt_logprobs"), fields
    assert cached() == (found, None)


def test_a_response_is_gone_on_with_by_its_transcript_as_vllm_knows_it(serve):
    talk = Responses(prose(200, 64))
    talk.ask(prose(200, 65))
    answer, receipt = step(serve, talk)
    agrees(talk, answer, receipt, BLOCK)
    for number in range(3):
        previous = answer["id"]
        settled(serve)
        talk.items = [{"role": "user", "content": prose(50, 66 + number)}]
        answer, receipt = step(serve, talk, previous_response_id=previous)
        agrees(talk, answer, receipt, BLOCK)
        assert (receipt["observed"]["cached_tokens"] or 0) > 0, "the conversation before was found"
