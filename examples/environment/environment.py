"""An environment in the form of SkyRL-Gym's BaseTextEnv: a sum, with feedback after a wrong answer.

SkyRL's own environments inherit from skyrl_gym.envs.base_text_env.BaseTextEnv and run unchanged; this one leaves the
base class out, so that the example installs nothing.
"""

import random
import re


def rows(split):
    """Make the sums of a split, without end: the source env://train of rows.yaml. No held-out sum is in train."""
    draw = random.Random(split)  # the same rows each time
    while True:
        a, b = draw.randint(1, 20), draw.randint(1, 20)
        is_held_out = (a * a + b * b) % 5 == 0
        if is_held_out == (split != "train"):
            yield {"question": f"What is {a} + {b}?", "answer": str(a + b)}


class Sums:
    def __init__(self, env_config, extras):
        self.answer = int(extras["reward_spec"]["ground_truth"])  # the answer of the row
        self.cost = env_config.cost  # environment.args of the job
        self.tries = extras["max_turns"]  # agent.maxAssistantTurns
        self.wrong, self.is_right = 0, False

    def init(self, prompt):
        """Return what the policy sees first, and info for the log."""
        return prompt, {}

    def step(self, action):
        """Return what follows an answer of the policy, and its reward."""
        feedback = self._check(action)
        self.is_right = not feedback
        if self.is_right:
            return self._result([], 1.0, done=True)
        self.wrong += 1
        message = {"role": "user", "content": feedback}
        return self._result([message], -self.cost, done=self.wrong == self.tries)

    def close(self):
        """Called at the end of each episode, whatever happened."""

    def get_metrics(self):
        """Numbers become curves."""
        return {"wrong": self.wrong, "right": float(self.is_right)}

    def _check(self, action):
        """Return what is wrong with the last number of an answer; empty if it is right."""
        numbers = re.findall(r"-?\d+", action)
        if not numbers:
            return "That is not a number. Reply with the number only."
        difference = int(numbers[-1]) - self.answer
        return f"{numbers[-1]} is too {'high' if difference > 0 else 'low'}. Try again." if difference else ""

    def _result(self, observations, reward, done):
        return {"observations": observations, "reward": reward, "done": done, "metadata": {}}
