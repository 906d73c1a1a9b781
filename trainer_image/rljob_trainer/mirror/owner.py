"""Which head writes the copy of a run: owner.json, which its head renews. Decisions are pure.

    no owner, released, or of this head's Job or folder --> taken at once
    of the same job by name --> taken once it was not renewed for a while; refused if it is
    of another job --> refused

Invariant: a head reads owner.json before each of its changes, and changes nothing once it names another head. Of two
heads that begin a copy in the same second, one creates owner.json, where the storage knows If-None-Match.
"""

import secrets
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rljob_api.errors import TransientError, UserError
from rljob_inputs.objects.folder import ObjectFolder

FILE_OWNER = "owner.json"
RENEW_SECONDS = 20.0
SILENCE_SECONDS = 3 * RENEW_SECONDS
"""After which a head that did not release the copy is dead."""
Verdict = Literal["take", "watch"]


class LostOwnershipError(TransientError):
    """Another head writes the copy now."""


class Owner(BaseModel):
    """The content of owner.json."""

    model_config = ConfigDict(extra="forbid", strict=True)

    job: str
    """Namespace and name."""
    run_id: str = ""
    """Identifies the run's folder."""
    head_job_uid: str = ""
    """The UID of the head's Kubernetes Job: a Pod in place of a lost one has the same."""
    session: str
    """Identifies one start of a head."""
    renewals: int = 0
    released: bool = False
    """Whether its head has ended in order."""


def refuse_living(found: Owner, url: str) -> UserError:
    """Return the error for a copy that another head renews."""
    return UserError(
        f"spec.checkpoint.storage: {url} is written by another run of {found.job} (session {found.session}), which is "
        "alive; stop it, or choose another prefix"
    )


@dataclass(eq=False)
class Ownership:
    """owner.json as this head writes it. Synchronous."""

    _folder: ObjectFolder
    _job: str
    _head_job_uid: str

    def __post_init__(self) -> None:
        self._session = secrets.token_hex(8)
        self._run_id, self._renewals = "", 0

    def read(self) -> Owner | None:
        content = self._folder.read(FILE_OWNER)
        try:
            return None if content is None else Owner.model_validate_json(content)
        except ValidationError as error:
            raise UserError(
                f"spec.checkpoint.storage: {self._folder.url}/{FILE_OWNER} is not readable; remove it if no other job "
                "writes there"
            ) from error

    def judge(self, found: Owner | None, run_id: str) -> Verdict:
        """Return whether this head may write the copy, or has to watch first whether the other one lives. `run_id`: of
        its folder, if it has one. Raise UserError if the copy is of another job."""
        if found is None:
            return "take"
        if found.job != self._job:
            raise UserError(
                f"spec.checkpoint.storage: {self._folder.url} has the files of the job {found.job}; choose another "
                f"prefix, or remove these files to use it for {self._job}"
            )
        is_own = (self._head_job_uid and found.head_job_uid == self._head_job_uid) or (
            run_id and found.run_id == run_id
        )
        return "take" if found.released or is_own else "watch"

    def take(self, run_id: str, *, is_new: bool) -> None:
        """Begin to write as this head. `is_new`: nobody has written the copy. Raise as `check`."""
        self._run_id = run_id
        if not is_new:
            self._folder.write(FILE_OWNER, self._describe())
        elif not self._folder.create(FILE_OWNER, self._describe()):
            self.check()  # it passes where only the answer to our own request was lost

    def check(self) -> None:
        """Raise LostOwnershipError if another head has taken over."""
        found = self.read()
        if found is None or found.session != self._session:
            who = (
                "without an owner: its owner.json is gone" if found is None else f"that of another head of {found.job}"
            )
            raise LostOwnershipError(
                f"spec.checkpoint.storage: {self._folder.url} is now {who}; this head ends, so that two do not write "
                "there"
            )

    def renew(self) -> None:
        """Raise as `check`."""
        self.check()
        self._renewals += 1
        self._folder.write(FILE_OWNER, self._describe())

    def release(self) -> None:
        """Let the next head begin at once. Raise as `check`."""
        self.check()
        self._folder.write(FILE_OWNER, self._describe(released=True))

    def _describe(self, *, released: bool = False) -> bytes:
        owner = Owner(
            job=self._job,
            run_id=self._run_id,
            head_job_uid=self._head_job_uid,
            session=self._session,
            renewals=self._renewals,
            released=released,
        )
        return owner.model_dump_json(indent=1).encode()
