"""Two players take stones in turn, 1, 2 or 3 each time, and the last stone wins. The model plays both.

Each player has its own conversation, and calls the model by the name of its seat: policy/first, policy/second. RLJob
trains each on its own answers and its own reward. Who answers with something that is no move loses.
"""

import os
import re

from openai import OpenAI

MODEL = os.environ.get("OPENAI_MODEL", "policy")
SEATS = ("first", "second")
RULES = "Two players take 1, 2 or 3 stones in turn. The player who takes the last one wins. Reply with a number."
SHOWN = ((9, 2), (6, 1))
"""Moves with which each conversation begins: without them, a small model writes sentences. Neither is the best one."""


def run(task):
    """Play one game. Return the reward of each seat, 1 or -1, and what its moves were like."""
    client, stones = OpenAI(), int(task["answer"])
    players = {seat: Player(client, f"{MODEL}/{seat}") for seat in SEATS}
    mover, winner = SEATS
    while stones:
        taken = players[mover].move(stones)
        if taken is None:
            break
        stones -= taken
        mover, winner = winner, mover
    return {
        "seats": {
            seat: {"reward": 1.0 if seat == winner else -1.0, "info": player.describe()}
            for seat, player in players.items()
        }
    }


class Player:
    """One conversation with the model."""

    def __init__(self, client, model):
        self.client, self.model = client, model
        self.messages = [{"role": "system", "content": RULES}]
        for stones, taken in SHOWN:
            self.messages += [describe_heap(stones), {"role": "assistant", "content": str(taken)}]
        self.moves = []
        """Whether each answer was a move, and whether it was the best one; None where all moves lose."""

    def move(self, stones):
        """Return how many stones the model takes; None if its answer is no move."""
        self.messages.append(describe_heap(stones))
        completion = self.client.chat.completions.create(model=self.model, messages=self.messages)
        text = completion.choices[0].message.content or ""
        self.messages.append({"role": "assistant", "content": text})
        taken = read_move(text, stones)
        best = stones % 4  # leaves a multiple of 4, after which all moves lose
        self.moves.append((taken is not None, taken == best if best else None))
        return taken

    def describe(self):
        legal = [is_move for is_move, _ in self.moves]
        best = [is_best for _, is_best in self.moves if is_best is not None]
        shares = {"legal": legal, "best": best}
        return {name: sum(found) / len(found) for name, found in shares.items() if found}


def describe_heap(stones):
    return {"role": "user", "content": f"Stones: {stones}. You take?"}


def read_move(text, stones):
    """Return the move that an answer is: a number alone, perhaps with a period."""
    found = re.fullmatch(r"\s*([123])\.?\s*", text)
    return int(found[1]) if found and int(found[1]) <= stones else None
