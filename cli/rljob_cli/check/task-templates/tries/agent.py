"""The agent: a program that calls the policy. Change it, or put your own in its place.

`run` plays one episode, in its own process. Its parameters get what their names say: `messages` is the prompt of the
row, `answer` its column. OPENAI_BASE_URL and OPENAI_API_KEY are set, so any client of OpenAI's API reaches the policy;
each token that it samples is trained.
"""

import json

from openai import OpenAI

TRIES = 2


def run(messages, answer):
    """Return the reward of the episode: 1 for a right answer; and what each wrong answer costs, by its completion."""
    client, messages, costs, is_right = OpenAI(), list(messages), {}, False
    for _ in range(TRIES):
        completion = client.chat.completions.create(model="policy", messages=messages)
        text = completion.choices[0].message.content or ""
        feedback = check(text, answer)
        if is_right := not feedback:
            break
        costs[completion.id] = -0.05
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": feedback}]
    return {"reward": float(is_right), "rewards": costs, "info": {"wrong": len(costs)}}


def check(text, answer):
    """Return what is wrong with an answer; empty if its last words are the right ones."""
    answer = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    words, right = text.strip().rstrip(".").split(), answer.split()
    return "" if words[-len(right) :] == right else f"{' '.join(words[-len(right) :])} is wrong. Try again."
