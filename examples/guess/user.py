"""The simulated user of the guess example: it knows the number, and says whether it is higher or lower.

Each call may run in another process, so what the user remembers is in `state`, which travels with the episode.
"""

import re


def respond(messages, state, answer, cost=0.1):
    """Return the user's message (None ends the conversation), the reward of the policy's turn, and info for the log.

    `answer` is the column of the row. A right answer gets no reward here: the reward function scores the last answer.
    `cost` is what each wrong answer costs at its own turn.
    """
    numbers = re.findall(r"\d+", messages[-1]["content"])
    if numbers and int(numbers[-1]) == int(answer):
        return None, 0.0, {"feedback": "right"}
    state["wrong"] = state.get("wrong", 0) + 1
    if not numbers:
        return "A number!", -cost, {"feedback": "no number"}
    feedback = "higher" if int(numbers[-1]) < int(answer) else "lower"
    return f"{feedback.capitalize()}.", -cost, {"feedback": feedback}
