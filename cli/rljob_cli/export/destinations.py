"""Where an export goes: a new folder, s3://bucket/path or hf://org/name.

Invariant: a place that refuses the model says so before the model is built.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rljob_api.errors import UserError
from rljob_api.manifest.sources import parse_source
from rljob_cli.output import say
from rljob_inputs.hub.repository import HubAccess
from rljob_inputs.hub.uploads import require_private, upload_model
from rljob_inputs.objects.uploads import require_empty, upload_folder

_LAST = ("config.json",)
"""Without it, libraries take no folder for a model."""


class Destination(Protocol):
    """A place other than a folder of this machine."""

    def check(self) -> None:
        """Raise UserError if the model cannot be written there, and TransientError."""

    def publish(self, folder: Path, message: str) -> str:
        """Write the complete model, and return its place. `message`: of the commit. Raise as `check`."""


@dataclass(frozen=True)
class Objects:
    url: str
    access: HubAccess

    def check(self) -> None:
        require_empty(self.url, self.access.objects)

    def publish(self, folder: Path, message: str) -> str:
        upload_folder(folder, self.url, self.access.objects, last=_LAST, report=say)
        return self.url


@dataclass(frozen=True)
class HubModel:
    source: str
    access: HubAccess
    is_public: bool

    def check(self) -> None:
        require_private(self.source, self.access, may_be_public=self.is_public)

    def publish(self, folder: Path, message: str) -> str:
        say(f"uploads {self.source}")
        return upload_model(folder, self.source, self.access, is_public=self.is_public, message=message)


def find_destination(to: str, *, is_public: bool) -> Destination | None:
    """Return the place that `--to` names; None for a folder. Raise UserError if it is none."""
    if is_public and not to.startswith("hf://"):
        raise UserError(f"--public is for --to hf://org/name, got --to {to}")
    if "://" not in to:
        return None
    try:
        kind = parse_source(to).kind
    except UserError:
        kind = "relative"
    access = HubAccess.from_environment(os.environ)
    if kind == "hf" and "/" in to.removeprefix("hf://").rstrip("/"):
        return HubModel(to.rstrip("/"), access, is_public)
    if kind == "object":
        return Objects(to.rstrip("/"), access)
    raise UserError(f"--to {to}: must be a new folder, s3://bucket/path or hf://org/name")
