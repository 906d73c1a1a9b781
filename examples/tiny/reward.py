"""A reward that even a random model can raise: the share of the letter e in what it writes. TRL's signature."""


def reward(completions, **columns):
    """One score for each completion, between 0 and 1."""
    return [completion.lower().count("e") / max(1, len(completion)) for completion in completions]
