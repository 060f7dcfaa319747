#!/usr/bin/env python3
"""Make the goldens: what Hugging Face transformers renders and tokenizes for every model here and conversation.

    python3 -m venv /tmp/goldens && /tmp/goldens/bin/pip install transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6
    /tmp/goldens/bin/python router/prefix/testdata/make_goldens.py [--traces DIR --out FOLDER [--share N]]

Requests are shaped as vLLM shapes them before it renders (vllm_shape.py), then given to `apply_chat_template`. Ids are
kept as their number and an FNV-1a digest. Without arguments goldens.json (conversations.json) and tau_bench.json (some
dialogues of configs/traces) are made. With --traces every text trace under DIR is written to FOLDER, as sessions and
goldens, for `cargo run --release -p prefix --example check_traces -- FOLDER`; of long sessions every N-th model's.
"""
import argparse
import datetime
import gzip
import json
import os

import jinja2
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

import recorded
from train_tokenizers import write
from vllm_shape import loops_over_content, shape_message, shape_tool

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
NOW = 1_763_697_600  # 2025-11-21 04:00 UTC
FAMILIES = ["tiny", "qwen_like", "llama_like", "mistral_like", "chatml", "mistral_v7", "deepseek_r1", "deepseek_v31",
            "gemma3", "harmony", "glm45", "kimi_k2", "phi4_mini"]
COMMITTED = 8  # dialogues of tau_bench.json
LONG = [("a word of it ", 20_000), ("0123456789", 3_000), ("x" * 60_000 + " ", 2), ("日本語", 8_000), ("👩‍👩‍👧‍👦", 2_000),
        ("<|im_end|>", 2_000), ("\r\n", 15_000), ("    ", 12_000), ("e\u0301", 8_000), ("=-", 20_000)]
REFUSALS = (jinja2.exceptions.TemplateError, TypeError, ValueError, KeyError, AttributeError)


class FixedDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc)


chat_template_utils.datetime = FixedDatetime


def folder(model):
    return os.path.join(ROOT, "configs/models/tiny") if model == "tiny" else os.path.join(HERE, "models", model)


class Model:
    def __init__(self, name):
        source = folder("tiny" if name == "quirks" else name)
        config = json.load(open(os.path.join(source, "tokenizer_config.json")))
        self.name = name
        self.tok = PreTrainedTokenizerFast(
            tokenizer_file=os.path.join(source, "tokenizer.json"),
            **{key: value for key, value in config.items() if key.endswith("_token")})
        self.tok.chat_template = open(os.path.join(folder(name), "chat_template.jinja")).read()
        self.parts = loops_over_content(self.tok.chat_template)

    def render(self, body):
        tools = body.get("tools")
        kwargs = dict(body.get("chat_template_kwargs") or {})
        if body.get("reasoning_effort") is not None:
            kwargs["reasoning_effort"] = body["reasoning_effort"]
            kwargs.setdefault("enable_thinking", body["reasoning_effort"] != "none")
        return self.tok.apply_chat_template(
            [shape_message(m, self.parts) for m in body["messages"]],
            tools=None if tools is None else [shape_tool(t) for t in tools], documents=body.get("documents"),
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False), tokenize=False, **kwargs)

    def ids(self, text, special=False):
        return self.tok(text, add_special_tokens=special)["input_ids"]


def digest(ids):
    """The number of ids, and FNV-1a of them as little-endian 32-bit numbers."""
    value = 0xcbf29ce484222325
    for byte in b"".join(id.to_bytes(4, "little") for id in ids):
        value = (value ^ byte) * 0x100000001b3 & 0xffffffffffffffff
    return [len(ids), f"{value:016x}"]


def chat_goldens(model, chats):
    for chat in chats:
        case = {"model": model.name, "chat": chat["name"]}
        try:
            case["text"] = model.render(chat["body"])
            if model.name != "quirks":
                case["ids"] = digest(model.ids(case["text"]))
        except REFUSALS as error:
            case["error"] = f"{type(error).__name__}: {error}"[:120]
        yield case


def text_goldens(model, texts):
    for text in texts:
        ids = model.ids(text)
        decoded = model.tok.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        case = {"model": model.name, "text": text, "ids": ids, "with_special": digest(model.ids(text, special=True))}
        yield case if decoded == text else {**case, "decoded": decoded}


def long_goldens(model):
    for unit, times in LONG:
        body = {"messages": [{"role": "user", "content": unit * times}]}
        yield {"model": model.name, "unit": unit, "times": times, "ids": digest(model.ids(model.render(body)))}


def step_goldens(model, session, tools):
    """[step, number of ids, digest]; null for a step that the template refuses."""
    for at, messages in enumerate(recorded.steps(session)):
        try:
            yield digest(model.ids(model.render({"messages": messages, "tools": tools})))
        except REFUSALS:
            yield None


def trace_goldens(models, sessions, tools, share=1, only=None):
    chosen = range(len(sessions)) if only is None else only
    made = {model.name: {} for model in models}
    for at in chosen:
        for place, model in enumerate(models):
            if (at + place) % share == 0:
                made[model.name][str(at)] = list(step_goldens(model, sessions[at], tools))
    return {"now": NOW, "tools": tools, "models": made}


def committed():
    conversations = json.load(open(os.path.join(HERE, "conversations.json")))
    goldens = {"now": NOW, "chats": [], "texts": [], "long": []}
    for name in [*FAMILIES, "quirks"]:
        model = Model(name)
        goldens["chats"] += chat_goldens(model, conversations["chats"])
        if name != "quirks":
            goldens["texts"] += text_goldens(model, conversations["texts"])
            goldens["long"] += long_goldens(model)
    write(os.path.join(HERE, "goldens.json"), goldens)
    path = os.path.join(ROOT, "configs/traces/tau_bench/airline.json.gz")
    sessions = json.load(gzip.open(path))
    made = trace_goldens([Model(name) for name in FAMILIES], sessions, recorded.AIRLINE_TOOLS, only=range(COMMITTED))
    write(os.path.join(HERE, "tau_bench.json"), made)


def all_traces(source, out, share):
    os.makedirs(out, exist_ok=True)
    models = [Model(name) for name in FAMILIES]
    for name, sessions, long in recorded.text_traces(source):
        with gzip.open(os.path.join(out, f"{name}.sessions.json.gz"), "wt", compresslevel=1) as file:
            json.dump(sessions, file, ensure_ascii=False)
        tools = recorded.AIRLINE_TOOLS if name == "tau_bench" else None
        made = trace_goldens(models, sessions, tools, share=share if long else 1)
        write(os.path.join(out, f"{name}.goldens.json"), made)
        steps = [step for of_model in made["models"].values() for steps in of_model.values() for step in steps]
        print(f"{name}: {len(sessions)} sessions, {len(steps)} steps of models, "
              f"{sum(step[0] for step in steps if step)} tokens", flush=True)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--traces", help="folder of recorded traces")
    arguments.add_argument("--out", help="where their sessions and goldens go")
    arguments.add_argument("--share", type=int, default=1, help="of long sessions, one in so many models")
    given = arguments.parse_args()
    if given.traces:
        all_traces(given.traces, given.out or arguments.error("--traces needs --out"), given.share)
    else:
        committed()


main()
