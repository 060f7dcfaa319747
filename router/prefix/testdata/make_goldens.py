#!/usr/bin/env python3
"""Make goldens.json: what Hugging Face transformers renders and tokenizes for every model here and conversation.

    python3 -m venv /tmp/goldens && /tmp/goldens/bin/pip install transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6
    /tmp/goldens/bin/python router/prefix/testdata/make_goldens.py [--train]

Requests are shaped as vLLM shapes them before it renders (content format, tool call arguments, tools as its model of
them dumps), then given to `apply_chat_template`. With --train the small tokenizers are trained anew as well.
"""
import copy
import datetime
import json
import os
import sys

import jinja2
import jinja2.ext
from jinja2 import nodes
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
NOW = 1_763_697_600  # 2025-11-21 04:00 UTC
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


class FixedDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc)


chat_template_utils.datetime = FixedDatetime


def folder(model):
    return os.path.join(ROOT, "configs/models/tiny") if model == "tiny" else os.path.join(HERE, "models", model)


def train_byte_level(pattern, specials, bos):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    if "Qwen" in specials:
        tok.normalizer = normalizers.NFC()
    tok.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=760, special_tokens=[s for s in specials if s != "Qwen"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    if bos:
        tok.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B",
                                          special_tokens=[(bos, tok.token_to_id(bos))])])
    return tok


def train_sentencepiece_like():
    tok = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
                "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"] + [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=specials, show_progress=False)
    words = ("▁" + line.replace(" ", "▁") for line in corpus())
    plain = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    plain.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    plain.train_from_iterator(words, trainer)
    state = json.loads(tok.to_str())
    trained = json.loads(plain.to_str())
    state["model"] = trained["model"]
    state["added_tokens"] = [t for t in trained["added_tokens"] if not t["content"].startswith("<0x")]
    tok = Tokenizer.from_str(json.dumps(state))
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                     decoders.Strip(" ", 1, 0)])
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tok.token_to_id("<s>"))])
    return tok


def corpus():
    yield from open(os.path.join(HERE, "make_goldens.py"))
    yield from json.dumps(json.load(open(os.path.join(HERE, "conversations.json"))), ensure_ascii=False).split(". ")


def train():
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    llama = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    made = {
        "qwen_like": (train_byte_level(QWEN, chatml + ["Qwen"], None), {"eos_token": "<|im_end|>"}),
        "llama_like": (train_byte_level(LLAMA3, llama, "<|begin_of_text|>"),
                       {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
        "mistral_like": (train_sentencepiece_like(), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    }
    for model, (tok, config) in made.items():
        write(os.path.join(folder(model), "tokenizer.json"), json.loads(tok.to_str()))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config, "clean_up_tokenization_spaces": False}
        write(os.path.join(folder(model), "tokenizer_config.json"), config)


def write(path, value):
    with open(path, "w", encoding="utf-8") as out:
        json.dump(value, out, ensure_ascii=False, indent=None, separators=(",", ":"))
        out.write("\n")


def loops_over_content(template):
    """vLLM's rule for the content format, on the template's syntax tree."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])
    tree = env.parse(template.replace("{% generation %}", "").replace("{% endgeneration %}", ""))

    def about(node, name, key=None):
        if isinstance(node, (nodes.Filter, nodes.Test)):
            return node.node is not None and about(node.node, name, key)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return about(node.node, name, key)
        if key is None:
            return isinstance(node, nodes.Name) and node.name == name
        if isinstance(node, nodes.Getitem):
            return about(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
        return isinstance(node, nodes.Getattr) and about(node.node, name) and node.attr == key

    lists, queue = {"messages"}, ["messages"]
    while queue:
        known = queue.pop()
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and about(assign.node, known) and assign.target.name not in lists:
                lists.add(assign.target.name)
                queue.append(assign.target.name)
    fors = list(tree.find_all(nodes.For))
    items = [f.target.name for f in fors if isinstance(f.target, nodes.Name) and any(about(f.iter, n) for n in lists)]
    return any(about(f.iter, item, "content") for f in fors for item in items)


def shape_message(message, parts_wanted):
    content = message.get("content")
    parts = [] if content is None else [{"type": "text", "text": content}] if isinstance(content, str) else content
    out = []
    for part in parts:
        if isinstance(part, str):
            out.append(part)
            continue
        text = part.get({"refusal": "refusal", "thinking": "thinking"}.get(part["type"], "text"))
        if text is not None:
            out.append({"type": "text", "text": text} if parts_wanted else text)
    out = [part for part in out if part]
    shaped = {"role": message["role"], "content": out if parts_wanted else "\n".join(out)}
    if message["role"] == "assistant":
        if message.get("tool_calls"):
            shaped["tool_calls"] = copy.deepcopy(message["tool_calls"])
            for call in shaped["tool_calls"]:
                arguments = call["function"].get("arguments")
                if isinstance(arguments, str) and arguments:
                    arguments = json.loads(arguments)
                call["function"]["arguments"] = arguments or {}
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        if reasoning is not None:
            shaped["reasoning"] = shaped["reasoning_content"] = reasoning
    if message["role"] == "tool" and "tool_call_id" in message:
        shaped["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        shaped["name"] = message["name"]
    return shaped


def shape_tool(tool):
    function = tool["function"]
    declared = {key: function.get(key) for key in ("name", "description", "parameters")}
    return {"type": tool.get("type", "function"), "function": {**declared, **function}, **
            {key: value for key, value in tool.items() if key not in ("type", "function")}}


def golden(tok, body):
    shaped = [shape_message(m, loops_over_content(tok.chat_template)) for m in body["messages"]]
    tools = body.get("tools")
    kwargs = dict(body.get("chat_template_kwargs") or {})
    if body.get("reasoning_effort") is not None:
        kwargs["reasoning_effort"] = body["reasoning_effort"]
    text = tok.apply_chat_template(
        shaped, tools=None if tools is None else [shape_tool(t) for t in tools], documents=body.get("documents"),
        add_generation_prompt=body.get("add_generation_prompt", True),
        continue_final_message=body.get("continue_final_message", False), tokenize=False, **kwargs)
    return text, tok(text, add_special_tokens=False)["input_ids"]


def main():
    if "--train" in sys.argv:
        train()
    conversations = json.load(open(os.path.join(HERE, "conversations.json")))
    goldens = {"now": NOW, "chats": [], "texts": []}
    for model in ("tiny", "qwen_like", "llama_like", "mistral_like", "quirks"):
        source = "tiny" if model == "quirks" else model
        config = json.load(open(os.path.join(folder(source), "tokenizer_config.json")))
        tok = PreTrainedTokenizerFast(
            tokenizer_file=os.path.join(folder(source), "tokenizer.json"),
            **{key: value for key, value in config.items() if key.endswith("_token")})
        tok.chat_template = open(os.path.join(folder(model), "chat_template.jinja")).read()
        for chat in conversations["chats"]:
            case = {"model": model, "chat": chat["name"]}
            try:
                case["text"], ids = golden(tok, chat["body"])
                if model != "quirks":
                    case["ids"] = ids
            except (jinja2.exceptions.TemplateError, TypeError, ValueError) as error:
                case["error"] = str(error)[:120]
            goldens["chats"].append(case)
        for text in conversations["texts"] if model != "quirks" else []:
            goldens["texts"].append({
                "model": model, "text": text, "ids": tok(text, add_special_tokens=False)["input_ids"],
                "with_special": tok(text, add_special_tokens=True)["input_ids"],
                "decoded": tok.decode(tok(text, add_special_tokens=False)["input_ids"], skip_special_tokens=False,
                                      clean_up_tokenization_spaces=False)})
    write(os.path.join(HERE, "goldens.json"), goldens)


main()
