"""The simulated user of the guess example: it knows the number, and says whether it is higher or lower.

Each call may run in another process, so what the user remembers is in `state`, which travels with the episode.
"""

import re

WIDTH = 7


def respond(messages, state, answer, low, cost=0.1):
    """Return the user's message (None ends the conversation), the reward of the policy's turn, and info for the log.

    `answer` and `low` are columns of the row. A right answer gets no reward here: the reward function scores the last
    answer. `cost` is what a wrong answer costs at its own turn; one outside the range in question costs three times it.
    """
    numbers = [int(number) for number in re.findall(r"\d+", messages[-1]["content"])]
    if numbers and numbers[-1] == int(answer):
        return None, 0.0, {"feedback": "right"}
    is_in_range = bool(numbers) and 0 <= numbers[-1] - low < WIDTH
    penalty = 1 if is_in_range else 3
    state["penalty"] = state.get("penalty", 0) + penalty
    if not numbers:
        return "A number!", -penalty * cost, {"feedback": "no number"}
    feedback = "higher" if numbers[-1] < int(answer) else "lower"
    return f"{feedback.capitalize()}.", -penalty * cost, {"feedback": feedback, "in_range": is_in_range}
