"""The simulated user, who replies to each answer without a tool call. Change it to simulate another one.

Each call may run in another process: what the user remembers is in `state`, a dict that travels with the episode.
"""

import re


def respond(messages, state, answer):
    """Return the message (None ends the conversation), the reward of the answer (None: none), and info for the log.

    `answer` is the column of the row; each column can be a parameter.
    """
    state["tries"] = state.get("tries", 0) + 1
    numbers = re.findall(r"-?\d+", messages[-1]["content"])
    if not numbers:
        return "That is not a number. Reply with the number only.", -0.04, {"feedback": "not a number"}
    difference = int(numbers[-1]) - int(answer)
    if difference == 0:
        return None, 0.0, {"feedback": "right"}
    feedback = "too high" if difference > 0 else "too low"
    return f"{numbers[-1]} is {feedback}. Try again.", -0.02, {"feedback": feedback}
