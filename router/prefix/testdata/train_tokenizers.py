#!/usr/bin/env python3
"""Train the small tokenizers in models/, each built like those of the family it stands for (pre-tokenizer, normalizer,
byte fallback, which added tokens are special), on the sources of this repository and the conversations beside this file.

    python router/prefix/testdata/train_tokenizers.py NAME...

They are trained once and kept: another corpus would give other ids.
"""
import json
import os
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT}|\p{{N}}{{1,3}}|{REST}"
TEKKEN = O200K.replace(SHORT, "").replace(r"\p{N}{1,3}", r"\p{N}")
NOT_HAN = [part.replace("]", r"&&[^\p{Han}]]") for part in (UPPER, LOWER)]
KIMI = (rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{NOT_HAN[0]}*{NOT_HAN[1]}+{SHORT}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{NOT_HAN[0]}+{NOT_HAN[1]}*{SHORT}|\p{{N}}{{1,3}}|{REST.replace('/', '')}")
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]
END, BEGIN = "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"
DEEPSEEK_CALLS = [f"<｜tool▁{what}｜>" for what in (
    "calls▁begin", "calls▁end", "call▁begin", "call▁end", "outputs▁begin", "outputs▁end", "output▁begin", "output▁end",
    "sep")]


def corpus():
    for name in ("make_goldens.py", "train_tokenizers.py", "vllm_shape.py"):
        yield from open(os.path.join(HERE, name), encoding="utf-8")
    yield from json.dumps(json.load(open(os.path.join(HERE, "conversations.json"))), ensure_ascii=False).split(". ")


def byte_level(patterns, specials, plain=(), vocab=760, bos=None, nfc=False):
    """Byte-level BPE; `specials` are special added tokens, `plain` are added tokens that are not special."""
    tok = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)])
    tok.decoder = decoders.ByteLevel()
    if nfc:
        tok.normalizer = normalizers.NFC()
    tok.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tok.add_special_tokens([token if isinstance(token, AddedToken) else AddedToken(token, special=True, normalized=False)
                            for token in specials])
    tok.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    if bos:
        tok.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B",
                                          special_tokens=[(bos, tok.token_to_id(bos))])])
    return tok


def byte_fallback(specials, plain, prepend, vocab=800):
    """BPE over text whose spaces are U+2581, with bytes for what is not in the vocabulary."""
    blank = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    trained = Tokenizer(models.BPE(**blank))
    trained.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    words = ("▁" + line.replace(" ", "▁") for line in corpus())
    names = ["<pad>", "<eos>", "<bos>", "<unk>"] if not prepend else ["<unk>", "<s>", "</s>"]
    trained.train_from_iterator(words, trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=names + [f"<0x{b:02X}>" for b in range(256)], show_progress=False))
    state = json.loads(Tokenizer(models.BPE(**blank)).to_str())
    made = json.loads(trained.to_str())
    state["model"] = made["model"]
    state["added_tokens"] = [t for t in made["added_tokens"] if not t["content"].startswith("<0x")]
    tok = Tokenizer.from_str(json.dumps(state))
    spaces = normalizers.Replace(" ", "▁")
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prepend else spaces
    if not prepend:
        tok.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tok.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tok.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    strip = [decoders.Strip(" ", 1, 0)] if prepend else []
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    bos = "<s>" if prepend else "<bos>"
    tok.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tok.token_to_id(bos))])
    return tok


def deepseek():
    specials = [BEGIN, END, "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"]
    return byte_level(DEEPSEEK, specials, [*DEEPSEEK_CALLS, "<think>", "</think>"], bos=BEGIN)


def rstripped(token):
    return AddedToken(token, special=True, normalized=False, rstrip=True)


CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THOUGHTS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TURNS = ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"]
HARMONY = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
           "<|message|>", "<|call|>"]
GLM = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
       "<|observation|>"]
KIMI_TOKENS = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
               "<|media_start|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"]
KIMI_CALLS = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
              "<|tool_call_argument_begin|>", "<|tool_call_end|>"]
PHI_TURNS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>", "<|tool_call|>",
             "<|/tool_call|>"]

MADE = {
    "qwen_like": (lambda: byte_level([QWEN], CHATML, THOUGHTS, nfc=True), {"eos_token": "<|im_end|>"}),
    "llama_like": (
        lambda: byte_level([LLAMA3], ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
                           bos="<|begin_of_text|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "mistral_like": (lambda: byte_fallback(TURNS, [], prepend=True),
                     {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "chatml": (lambda: byte_level([], CHATML), {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}),
    "mistral_v7": (
        lambda: byte_level([TEKKEN], ["<unk>", "<s>", "</s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", *TURNS],
                           bos="<s>"),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "deepseek_r1": (deepseek, {"bos_token": BEGIN, "eos_token": END, "pad_token": END}),
    "deepseek_v31": (deepseek, {"bos_token": BEGIN, "eos_token": END, "pad_token": "<｜▁pad▁｜>"}),
    "gemma3": (
        lambda: byte_fallback(["<start_of_turn>", "<end_of_turn>", "<start_of_image>"],
                              ["\n\n", "\n\n\n", "▁▁", "▁▁▁▁", "\t\t", "<table>"], prepend=False),
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}),
    "harmony": (lambda: byte_level([O200K], HARMONY), {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"}),
    "glm45": (lambda: byte_level([LLAMA3], GLM, [*THOUGHTS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
                                                 "<tool_response>", "</tool_response>", "/nothink"]),
              {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}),
    "kimi_k2": (lambda: byte_level([KIMI], KIMI_TOKENS, [*KIMI_CALLS, "<think>", "</think>"]),
                {"bos_token": "[BOS]", "eos_token": "<|im_end|>"}),
    "phi4_mini": (lambda: byte_level([O200K], ["<|endoftext|>", *map(rstripped, PHI_TURNS)]),
                  {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}),
}


def write(path, value):
    with open(path, "w", encoding="utf-8") as out:
        json.dump(value, out, ensure_ascii=False, separators=(",", ":"))
        out.write("\n")


def main():
    for name in sys.argv[1:]:
        train, config = MADE[name]
        folder = os.path.join(HERE, "models", name)
        write(os.path.join(folder, "tokenizer.json"), json.loads(train().to_str()))
        write(os.path.join(folder, "tokenizer_config.json"),
              {"tokenizer_class": "PreTrainedTokenizerFast", **config, "clean_up_tokenization_spaces": False})


if __name__ == "__main__":
    main()
