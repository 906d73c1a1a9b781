"""Errors of a job's inputs, with the field of the manifest that causes them."""

from rljob_api.errors import UserError


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; empty without one."""
    return next(iter(str(error).strip().splitlines()), "")


class InputError(UserError):
    """An input is wrong. `path` is the field of the manifest, `message` what is wrong with it and the fix."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message
