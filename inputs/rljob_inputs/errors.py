"""Errors of a job's inputs, with the field of the manifest that causes them."""

from __future__ import annotations

from rljob_api.errors import UserError


class InputError(UserError):
    """An input is wrong. `path` is the field of the manifest, `message` what is wrong with it and the fix."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message

    def at(self, field: str, source: str) -> InputError:
        """Return the error of another source of the same kind: `source` in place of `field`."""
        return InputError(self.path.replace(field, source, 1), self.message.replace(field, source))
