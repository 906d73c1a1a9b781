"""The functions that the policy may call. The model sees their names, typed parameters and docstrings."""


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b
