#!/usr/bin/env python3
"""Train the tokenizer of the tiny model folder and write the folder's JSON files.

  train_tokenizer.py --dialogues gpt-4o-airline.json.gz --sources REPOSITORY

`--dialogues` is a file of tau-bench's historical_trajectories (MIT), `--sources` a checkout whose own *.rs and *.md
files are added. Deterministic for equal input. Needs the pip package `tokenizers`, nothing else.
The chat template lies beside this script in chat_template.jinja and is written by hand.
"""
import argparse
import gzip
import json
import pathlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HERE = pathlib.Path(__file__).resolve().parent


def dialogues(path):
    """Every text of every message once, tool calls as JSON."""
    seen = set()
    with gzip.open(path, "rt") as file:
        for episode in json.load(file):
            for message in episode["traj"]:
                texts = [message.get("content") or ""]
                texts += [json.dumps(call["function"]) for call in message.get("tool_calls") or []]
                for text in texts:
                    if text and text not in seen:
                        seen.add(text)
                        yield text


def sources(root):
    """This repository's own words."""
    for pattern in ("*.md", "*.rs"):
        for path in sorted(pathlib.Path(root).rglob(pattern)):
            if "target" not in path.parts:
                yield path.read_text()


def config(vocab, eos, pad):
    """Qwen3's architecture at a size that any machine can run."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32",
        "vocab_size": vocab, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32768,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
        "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None,
        "max_window_layers": 2, "initializer_range": 0.25, "tie_word_embeddings": False, "use_cache": True,
        "bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad,
    }


def tokenizer_config():
    """What Python loaders want to know."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32768, "bos_token": None,
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None,
        "additional_special_tokens": ["<|im_start|>"], "clean_up_tokenization_spaces": False,
    }


def write(name, value):
    (HERE / name).write_text(json.dumps(value, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dialogues", required=True)
    parser.add_argument("--sources", required=True)
    parser.add_argument("--vocab", type=int, default=4096)
    options = parser.parse_args()

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = list(dialogues(options.dialogues)) + list(sources(options.sources))
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=options.vocab, special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.save(str(HERE / "tokenizer.json"))
    eos, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    write("config.json", config(tokenizer.get_vocab_size(), eos, pad))
    write("tokenizer_config.json", tokenizer_config())


if __name__ == "__main__":
    main()
