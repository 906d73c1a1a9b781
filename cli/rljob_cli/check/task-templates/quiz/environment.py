"""The environment, with OpenRLHF's interface. Change it, or put your own in its place.

docs/environments.md of RLJob has the interfaces of other projects.

Each episode has a new object: `reset` returns what the policy sees first, `step` replies to each of its answers.
"""

import json


class AgentInstance:
    def __init__(self, tries=2):
        self.tries = tries

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        """Return the reward of the answer, whether it is right (for the curves), the reply, whether it ends."""
        self.tries -= 1
        feedback = check(states["action_text"], states["label"])
        return {
            "rewards": -0.05 if feedback else 1.0,
            "scores": 0.0 if feedback else 1.0,
            "environment_feedback": feedback,
            "done": not feedback or self.tries == 0,
        }


def check(text, answer):
    """Return what is wrong with an answer; empty if its last words are the right ones."""
    answer = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    words, right = text.strip().rstrip(".").split(), answer.split()
    return "" if words[-len(right) :] == right else f"{' '.join(words[-len(right) :])} is wrong. Try again."
