"""What workers-shim says to vLLM, said by hand: if this fails, the engine has changed and not the router."""

from engine import BLOCK

LONG = "The reservation was made in May for two passengers who asked for a window. " * 30


def tokens(engine, text):
    return engine.post("/tokenize", {"model": "tiny", "prompt": text})["tokens"]


def complete(engine, prompt, max_tokens, **more):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    return engine.post("/v1/completions", body)


def test_a_replicated_prefix_is_served_from_the_targets_cache_with_equal_text(engines):
    source, target = engines
    prompt = tokens(source, LONG)
    alone = complete(source, prompt, 24)["choices"][0]["text"]

    sealed = prompt[:len(prompt) // BLOCK * BLOCK]
    before = target.prompt_tokens_from("external_kv_transfer")
    lent = complete(source, sealed, 1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
    complete(target, sealed, 1, kv_transfer_params=lent["kv_transfer_params"])
    assert target.prompt_tokens_from("external_kv_transfer") - before >= len(sealed) - BLOCK

    served = complete(target, prompt, 24)
    assert served["choices"][0]["text"] == alone
    assert served["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(sealed) - BLOCK
