"""The environment, with OpenRLHF's interface. Change it, or put your own in its place.

docs/environments.md of RLJob has the interfaces of other projects.

Each episode has a new object: `reset` returns what the policy sees first, `step` replies to each of its answers.
"""

import re


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
    """Return what is wrong with the last number of an answer; empty if it is right."""
    numbers = re.findall(r"-?\d+", text)
    if not numbers:
        return "That is not a number. Reply with the number only."
    difference = int(numbers[-1]) - int(answer)
    return f"{numbers[-1]} is too {'high' if difference > 0 else 'low'}. Try again." if difference else ""
