"""A program that calls a model: it asks for a sum, and says what is wrong with the answer until it is right.

It is an ordinary script on OpenAI's SDK that runs against any endpoint:

    export OPENAI_BASE_URL=... OPENAI_API_KEY=... OPENAI_MODEL=...
    python agent.py "What is 17 + 14? Reply with the number only." 31

RLJob calls `run` once for each episode, in its own process, with the columns of the row by name. There the variables
lead to the model that is trained.
"""

import json
import os
import re
import sys
from pathlib import Path

from openai import OpenAI

MODEL = os.environ.get("OPENAI_MODEL", "policy")
TRIES = 3


def run(messages, answer):
    """Return the reward of the episode, the costs of its wrong answers, and numbers for the log."""
    client, messages, costs, texts = OpenAI(), list(messages), {}, []
    while len(texts) < TRIES:
        completion = client.chat.completions.create(model=MODEL, messages=messages)
        choice = completion.choices[0]
        texts.append(choice.message.content or "")
        feedback = check(texts[-1], choice.finish_reason == "length", answer)
        if not feedback:
            break
        costs[completion.id] = -0.05
        messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": feedback}]
    is_right = len(costs) < len(texts)
    return {
        "reward": float(is_right),
        "rewards": costs,
        "info": {"right": is_right, "first": is_right and not costs, "answers": len(texts)},
    }


def check(text, is_cut_off, answer):
    """Return what is wrong with an answer; empty if it is right."""
    numbers = re.findall(r"-?\d+", text)
    if is_cut_off or not numbers:
        return "That is not a number. Reply with the number only."
    difference = int(numbers[-1]) - int(answer)
    return f"{numbers[-1]} is too {'high' if difference > 0 else 'low'}. Try again." if difference else ""


if __name__ == "__main__":
    if "RLJOB_EPISODE" in os.environ:  # started by agent.runner.command, which reads the last line
        episode = json.loads(Path(os.environ["RLJOB_EPISODE"]).read_text())
        prompt, expected = episode["prompt"], episode["ground_truth"]
    else:
        question, expected = sys.argv[1:]
        prompt = [{"role": "user", "content": question}]
    print(json.dumps(run(prompt, expected)))
