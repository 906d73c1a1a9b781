"""The tool of the calculator example. The model sees its name, typed parameters and docstring."""


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b
