"""A tiny model that calls the tools of a sandbox: `python e2e/tool_model.py FOLDER` trains it in half a minute.

In its first turn it runs Python code, and writes a file in half of its episodes. In the second turn it reads the file
with a shell. Then it answers what it has read. It is fitted to this conversation, and can do nothing else.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TINY = ROOT / ".models/tiny-qwen3"
ROWS = ROOT / "examples/quickstart/data/train.jsonl"
WRITE, KEEP, READ = "open('n', 'w').write('7')", "n = 7", "cat n"
"""Code of the first turn: with a file, and without. Command of the second turn."""
WRITTEN, MISSING = "7", "cat: n: No such file or directory\n[exit code 1]"
"""What the second turn reads."""
ANSWERS = {WRITTEN: "seven", MISSING: "nothing"}
RESULTS = {WRITE: ("1", WRITTEN), KEEP: ("[no output]", MISSING)}
"""By code of the first turn: what the tools return to both turns."""
_END = "<|im_end|>"
_NUM_STEPS, _BATCH_SIZE, _LEARNING_RATE = 150, 4, 3e-3
_IGNORED = -100

Piece = tuple[str, bool]
"""Text of a conversation, and whether the model writes it."""


def write_call(function: str, **arguments: str) -> str:
    """A call as RLJob writes it into a prompt."""
    return f"<tool_call>\n{json.dumps({'name': function, 'arguments': arguments})}\n</tool_call>"


def build_messages(question: str, code: str) -> list[dict[str, Any]]:
    """The conversation of an episode."""
    result, content = RESULTS[code]
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": write_call("run_python", code=code)},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": write_call("run_shell", command=READ)},
        {"role": "tool", "content": content},
        {"role": "assistant", "content": ANSWERS[content]},
    ]


def split(template: Any, messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> Iterator[Piece]:
    """Each answer, with what precedes it. `template`: rljob_trainer's ChatTemplate."""
    before = ""
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            text = template.render(messages[:number], tools, generate=True)
            assert text.startswith(before), "the template writes what was said as the model wrote it"
            yield text.removeprefix(before), False
            yield f"{message['content']}{_END}", True
            before = f"{text}{message['content']}{_END}"


def train(folder: Path) -> None:
    """Write the model to `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from rljob_api.wire.calls import ToolSchema
    from rljob_service.worker.code.code_sandbox import SCHEMAS
    from rljob_trainer.conversation.template import ChatTemplate

    torch.set_num_threads(1)  # the matrices are small
    torch.manual_seed(0)
    random.seed(0)
    tools = [ToolSchema.model_validate(schema) for schema in SCHEMAS.values()]
    questions = [json.loads(line)["question"] for line in ROWS.read_text().splitlines()]
    conversations = [build_messages(question, code) for question in questions for code in RESULTS]
    base = AutoTokenizer.from_pretrained(TINY)
    split_up = [list(split(ChatTemplate(base, "hermes"), messages, tools)) for messages in conversations]
    # A token per word of these conversations: they are short, and the model learns them sooner.
    tokenizer = base.train_new_from_iterator(["".join(text for text, _ in pieces) for pieces in split_up], 1024)
    rows = [_encode(tokenizer, pieces) for pieces in split_up]
    config = AutoConfig.from_pretrained(TINY, vocab_size=len(tokenizer))
    model = AutoModelForCausalLM.from_config(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, _NUM_STEPS)
    for step in range(_NUM_STEPS):
        batch = random.sample(rows, _BATCH_SIZE)
        length = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch])
        labels = torch.tensor([labels + [_IGNORED] * (length - len(labels)) for _, labels in batch])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == _NUM_STEPS - 1:
            print(f"step {step}: loss {loss.item():.4f}, {length} tokens", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # Pods run as another user


def _encode(tokenizer: Any, pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
    """Token ids, and the labels of the loss: the model's own tokens alone."""
    ids: list[int] = []
    labels: list[int] = []
    for text, is_answer in pieces:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        labels += tokens if is_answer else [_IGNORED] * len(tokens)
    return ids, labels


if __name__ == "__main__":
    train(Path(sys.argv[1]))
