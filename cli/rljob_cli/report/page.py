"""The page: everything that a report shows, as one HTML text. Pure, except that it reads its template.

The report of `rljob report` and the page of `rljob ui` are the same template: a live page gets its samples, and what
changes, from its server. Invariants: text of the run is escaped wherever it stands; no secret of the job stands
anywhere; a report loads nothing, and a live page from its server alone, which its own policy enforces.
"""

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from itertools import chain
from typing import Any, NamedTuple

import jinja2
import markupsafe
import yaml
from markupsafe import Markup

from rljob_api.run.origin import list_changes
from rljob_api.run.sessions import Session
from rljob_api.run.trajectories import SampleRow
from rljob_api.wire.redaction import Redactor, find_values, redact_job
from rljob_cli.cluster.formatting import format_age
from rljob_cli.report.charts import Chart, describe_panels
from rljob_cli.report.collect import RunData
from rljob_cli.report.samples import choose_samples, describe_sample
from rljob_cli.report.sections import (
    ROLES,
    build_lost_times,
    build_phase_times,
    build_role_times,
    summarize_failures,
    summarize_rewards,
)
from rljob_cli.run.curves import build_panels
from rljob_cli.run.summary import find_active_seconds, summary_lines
from rljob_cli.trajectories.tables import number
from rljob_cli.trajectories.tables import seconds as show_seconds

_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""Colours of a terminal, in the last lines of logs."""
_FILES = resources.files("rljob_cli.report") / "template"
_PROGRAMS = ("uPlot.iife.min.js", "report.js")
_STYLES = ("uPlot.min.css", "report.css")
"""uPlot's files are as released."""


class RunLine(NamedTuple):
    """A run in the list of runs. None: unknown."""

    name: str
    phase: str
    step: int
    total_steps: int
    reward: float | None
    """Mean score of the last step."""
    accuracy: float | None
    """Accuracy of the last evaluation of the first set."""
    changed: datetime | None
    """When its last step or evaluation ended."""
    differs: str = ""
    """Its settings that the other runs do not have alike."""


class Choices(NamedTuple):
    """What the filters of the samples offer."""

    rewards: list[str]
    reasons: list[str]


@dataclass(frozen=True)
class LiveView:
    """What a live page has besides its run."""

    name: str
    """Name of the run, in the list and in addresses."""
    runs: Sequence[RunLine]
    colours: Mapping[str, int]
    """The number of the colour of each run whose curves are in the charts: its place in the list of runs."""
    choices: Choices
    query: str
    """Selects the run and the overlaid ones, in an address."""
    cursor: str
    """What the page has of the run."""
    charts: Sequence[Chart] | None
    """None: the page has them, and gets its sections alone."""


def render_page(run: RunData, now: datetime, live: LiveView | None = None) -> str:
    """Return the page of a run."""
    chosen = [] if live else choose_samples(run.samples)
    steps, sessions, redactor = run.metrics.steps, run.summary.sessions, build_redactor(run.job)
    described: dict[str, Any] = {}
    script = style = ""
    if live is None or live.charts is not None:
        described = {"samples": [describe_sample(row) for row in chosen]}
        if live:
            own = {"run": live.name, "sections": f"sections?{live.query}", "query": live.query, "cursor": live.cursor}
            described = {"live": own | {"colours": live.colours}}
        described["charts"] = live.charts if live else describe_panels(build_panels(run.metrics))
        script, style = ("\n".join(map(_read, names)) for names in (_PROGRAMS, _STYLES))
    data = embed_json(redactor.redact(described))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "score": number,
        "share": lambda value: f"{100 * value:.0f}%",
        "seconds": show_seconds,
        "ago": lambda then: f"{format_age(then, now)} ago" if then else "",
        "plain": lambda text: _ESCAPE_SEQUENCE.sub("", text),
    }
    page = environment.from_string(_read("report.html.jinja")).render(
        run=run,
        summary=run.summary,
        created=f"{now:%-d %B %Y, %H:%M %Z}",
        lines=list(summary_lines(run.summary)),
        live=live,
        choices=live.choices if live else list_choices(chosen),
        phases=build_phase_times(run.summary),
        lost=build_lost_times(run.summary),
        active=find_active_seconds(run.summary),
        roles=build_role_times(steps),
        role_names=ROLES,
        rewards=summarize_rewards(chain.from_iterable(run.samples)),
        num_steps=len(steps),
        failures=summarize_failures(run.metrics, chain.from_iterable(run.samples)),
        ended=[failure for session in sessions for failure in session.failures],
        sessions=sessions,
        changes=list_changes(run.folder),
        versions=_list_versions(run, sessions),
        job=None
        if run.job is None
        else yaml.safe_dump(redact_job(run.job), sort_keys=False, allow_unicode=True, width=120),
        num_shown=len(chosen),
        num_shown_files=len({(row.step, row.lane) for row in chosen}),
        data=data,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    return _hide_outside(page, (style, data, script), redactor)


def _hide_outside(page: str, kept: Sequence[str], redactor: Redactor) -> str:
    """Hide secrets in all but these parts, in their order: a value such as `completion`, of a variable like ANSWER_KEY,
    is also a word of the program and a name in its data."""
    hidden = []
    for part in filter(None, kept):
        before, _, page = page.partition(part)
        hidden += [redactor.hide(before), part]
    return "".join([*hidden, redactor.hide(page)])


def build_redactor(job: dict[str, Any] | None) -> Redactor:
    """Return what hides the job's secrets in the page and in what a live page gets, in each form in which a text stands
    there: as it is, in HTML, and in JSON, which calls of tools also have."""
    values = list(find_values(job or {}))
    writers: list[Callable[[str], str]] = [
        str,
        markupsafe.escape,
        lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
        lambda text: embed_json(text)[1:-1],
    ]
    return Redactor(str(write(value)) for value in values for write in writers)


def list_choices(rows: Iterable[SampleRow]) -> Choices:
    results = [result for row in rows for result in row.rewards]
    reasons = {result.reason for result in results if result.reason}
    return Choices(list(dict.fromkeys(result.name for result in results)), sorted(reasons))


def _read(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def embed_json(value: Any) -> Markup:
    """Return JSON that no HTML parser takes for the end of its element, or for a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _list_versions(run: RunData, sessions: list[Session]) -> list[tuple[str, str]]:
    """Return names and versions: the programs, the model, the job, and each reward that scored."""
    by_session = sessions[-1].versions if sessions else {}
    found = list((by_session | run.summary.versions).items())
    model = (((run.job or {}).get("spec") or {}).get("model")) or {}
    if model:
        commit = run.summary.model_commit
        revision = f"revision {model.get('revision') or 'not set'}" + (f", commit {commit}" if commit else "")
        found.append(("model", f"{model.get('source')}, {revision}"))
    if run.job_digest:
        found.append(("job (digest of spec)", run.job_digest))
    versions: dict[str, Counter[str]] = {}
    for row in chain.from_iterable(run.samples):
        for result in row.rewards:
            if result.version:
                versions.setdefault(result.name, Counter())[result.version] += 1
    for name, counts in versions.items():
        shown = ", ".join(f"{version} ({count} samples)" for version, count in counts.most_common())
        found.append((f"reward {name}", shown))
    return found
