"""Gives the committed tiny model random weights, so that real engines can run it without a download.

    make_weights.py MODEL_FOLDER OUT_FOLDER

The weights are drawn wide (`initializer_range` in config.json): greedy answers then depend on every earlier token, and a
missing or foreign KV block shows up as other text. The seed is fixed: every run makes the same model.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SEED = 20261121


def main(model: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(model / name, out / name)
    torch.manual_seed(SEED)
    weights = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out)).to(torch.float32).eval()
    weights.save_pretrained(out)
    # What was saved is a newer library's idea of the configuration; ours is what the router reads.
    shutil.copyfile(model / "config.json", out / "config.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
