"""What the checks of a job's inputs return: findings at fields of the manifest, a table of prompt lengths, and errors.

Invariant: plain data without any heavy import, so that the CLI can show it quickly.
"""

from dataclasses import dataclass

from rljob_api.errors import UserError


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or for a warning, may go wrong."""

    path: str
    """Field of the manifest, such as spec.data.train.prompt."""
    message: str
    """What is wrong, where in the files, and the fix."""
    is_warning: bool = False
    is_transient: bool = False
    """Nothing is known to be wrong: the Hub cannot be reached from here."""
    is_refused: bool = False
    """The Hub does not have it, or not for this machine's token."""


@dataclass(frozen=True)
class LengthTable:
    """Lengths of the prompts of one dataset, in tokens."""

    path: str
    """spec.data.train, spec.data.mix[0] or spec.data.eval."""
    num_rows: int
    """Rows of the dataset, or of its beginning."""
    is_whole: bool
    """Whether all rows were read. A check reads the beginning of a large dataset."""
    num_measured: int
    """Rows that were tokenized: all, or an even sample."""
    min: int
    median: int
    p95: int
    max: int
    limit: int | None
    """Longest prompt that the job uses. None: no limit is known."""
    limit_reason: str
    """Where the limit comes from, such as `rollout.maxModelLen 512 - rollout.sampling.maxTokens 32`."""
    num_too_long: int
    """Measured prompts above the limit. The job leaves them out."""


def describe_lengths(table: LengthTable) -> str:
    """Return the table as one line."""
    rows = f"{table.num_rows} prompts" if table.is_whole else f"the first {table.num_rows} prompts"
    sample = f" ({table.num_measured} measured)" if table.num_measured < table.num_rows else ""
    sizes = f"min {table.min}, median {table.median}, p95 {table.p95}, max {table.max}"
    limit = f"; at most {table.limit} ({table.limit_reason})" if table.limit is not None else ""
    left_out = f"; {table.num_too_long} are left out" if table.num_too_long else ""
    return f"{table.path}: {rows}{sample}, in tokens: {sizes}{limit}{left_out}"


def describe_too_long(table: LengthTable) -> str:
    return (
        f"{table.num_too_long} of {table.num_measured} prompts have more than {table.limit} tokens "
        f"({table.limit_reason}) and are left out; the longest has {table.max}"
    )


def describe_all_too_long(table: LengthTable) -> str:
    return (
        f"all {table.num_measured} prompts are too long: the shortest has {table.min} tokens, and the limit is "
        f"{table.limit} ({table.limit_reason}); raise it, or shorten the prompts"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; empty without one."""
    return next(iter(str(error).strip().splitlines()), "")


class InputError(UserError):
    """An input is wrong. `path` is the field of the manifest, `message` what is wrong with it and the fix."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message
