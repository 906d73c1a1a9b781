"""`rljob trajectories`: show the samples of a run and their scores, filtered."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.run.trajectories import SampleRow
from rljob_cli.options import ShowOptions
from rljob_cli.output import print_json
from rljob_cli.tables import show
from rljob_cli.trajectories.conversation import LEGEND, build_conversation, is_conversation
from rljob_cli.trajectories.index import ORDER_BY, LogIndex, Query, read_rows
from rljob_cli.trajectories.log import find_log
from rljob_inputs.machine.installation import require

_ANSWER_LIMIT, _CONVERSATION_LIMIT = 20, 5


def trajectories_command(run: str, query: Query, options: ShowOptions) -> int:
    """With a target, the run is that of a job in a cluster."""
    require("rljob trajectories", "data")
    if query.lane not in (None, "train", "eval"):
        raise UserError(f"--lane must be train or eval, got {query.lane}")
    if query.eval_set is not None:
        if query.lane == "train":
            raise UserError("--eval-set is for the lane eval; remove --lane train")
        query = replace(query, lane="eval")
    if not options.target:
        return _show_run(find_log(run, options.directory), query, options)
    from rljob_cli.cluster.commands import with_copy

    def show_copy(copy: Path) -> int:
        return _show_run(find_log(str(copy), options.directory), query, options)

    return with_copy(options.target, run, query.reads, show_copy)


def _show_run(folder: Path, query: Query, options: ShowOptions) -> int:
    limit, is_json = options.limit, options.output == "json"
    rows = _require_names(folder, query, read_rows(folder, query))
    if options.sort is not None:  # one more than is shown says whether there are others
        shown = (0 if is_json else _ANSWER_LIMIT) if limit is None else limit
        index = LogIndex(folder)
        index.read(query)
        found = index.select(replace(query, order=ORDER_BY[options.sort]), newest_first=True)
        rows = iter(index.read_samples(found[: shown + 1] if shown else found))
    if is_json:
        for row in islice(rows, limit or None):
            print_json(row.model_dump())
        return 0
    first = next(rows, None)
    if first is None:
        show("no sample matches")
        return 0
    if limit is None:
        limit = _CONVERSATION_LIMIT if is_conversation(first) else _ANSWER_LIMIT
    rows = chain([first], rows)
    for row in islice(rows, limit or None):
        show(build_conversation(row, full=options.full, messages=not options.tokens, tokens=options.tokens))
    show(LEGEND)
    if next(rows, None) is not None:
        show(f"the first {limit}; more with --limit (0: all)")
    return 0


def _require_names(folder: Path, query: Query, rows: Iterator[SampleRow]) -> Iterator[SampleRow]:
    """Return the rows. Raise UserError if there is none because the run has no such reward or evaluation set."""
    first = next(rows, None)
    if first is not None:
        return chain([first], rows)
    rewards = (result.name for row in read_rows(folder, Query()) for result in row.rewards)
    if query.reward is not None and query.reward not in (names := sorted({*rewards})):
        raise UserError(
            f"--reward must be a reward of the run: {', '.join(names) or 'it has none'}; got {query.reward}"
        )
    sets = (row.set for row in read_rows(folder, Query(lane="eval")) if row.set is not None)
    if query.eval_set is not None and query.eval_set not in (names := sorted({*sets})):
        found = ", ".join(names) or "it has none"
        raise UserError(f"--eval-set must be an evaluation set of the run: {found}; got {query.eval_set}")
    return iter(())
