"""A reader of exports under transformers 4: `python older_reader.py FOLDER...` prints what it found in each, as JSON.

Imports nothing of RLJob, which its environment does not have."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

TEXT = "Question: What is 2 + 2?\nAnswer:"
MESSAGES = [{"role": "user", "content": TEXT}]
UNKNOWN = "does not recognize this architecture"
MULTIMODAL = "Unrecognized configuration class"


def load(folder: Path, kind=AutoModelForCausalLM):
    """Return the model; None if this transformers does not have it."""
    try:
        return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    except ValueError as error:
        if UNKNOWN in str(error):
            return None
        if MULTIMODAL in str(error) and kind is AutoModelForCausalLM:
            return load(folder, AutoModelForImageTextToText)
        raise


@torch.no_grad()
def read(folder: Path) -> dict:
    """Return ids of the text and of the prompt, and the largest difference from the logits in the folder."""
    if (model := load(folder)) is None:
        return {"unknown": True}
    inputs = torch.load(folder / "expected.pt")
    logits = model(inputs["ids"]).logits
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {
        "difference": float((logits - inputs["logits"]).abs().max()),
        "ids": tokenizer(TEXT)["input_ids"],
        "prompt": tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True),
    }


def main() -> None:
    for argument in sys.argv[1:]:
        folder = Path(argument)
        try:
            found = read(folder)
        except Exception as error:  # one model must not hide the others
            found = {"error": f"{type(error).__name__}: {error}"}
        print("READ", json.dumps({"name": folder.name, **found}), flush=True)


if __name__ == "__main__":
    main()
