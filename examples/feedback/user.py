"""The simulated user of the feedback example: says whether the policy's number is too high or too low.

Each call may run in another process, so what the user remembers is in `state`, which travels with the episode.
"""

import re


def respond(messages, state, answer):
    """Return the user's message (None ends the conversation), the reward of the policy's turn, and info for the log.

    `answer` is the column of the row. A right answer gets no reward here: the reward function scores the last answer.
    """
    state["tries"] = state.get("tries", 0) + 1
    numbers = re.findall(r"-?\d+", messages[-1]["content"])
    if not numbers:
        return "That is not a number. Reply with the number only.", -0.1, {"feedback": "not a number"}
    difference = int(numbers[-1]) - int(answer)
    if difference == 0:
        return None, 0.0, {"feedback": "right"}
    feedback = "too high" if difference > 0 else "too low"
    return f"{numbers[-1]} is {feedback}. Try again.", -0.05, {"feedback": feedback}
