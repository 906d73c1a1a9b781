"""The HTTP server of `rljob ui`: the page, its samples, and what changes, as server-sent events.

Serves this machine only, below a random path: other users of the machine cannot read it, nor can pages
of other sites, whatever name they give this address. Invariants: nothing changes a run; a request reads one page of
samples; nothing that reads a run's files holds the event loop; no answer has a secret of the job.

A page learns new steps, who waits for whom, and new samples while it is open. Invariant: a cursor says all that its
page has. So a page that reconnects, also to another server, loses nothing that is still known, and gets nothing twice;
if the run's history was cut, as by a restart from a checkpoint, it starts again.
"""

import asyncio
import contextlib
import ctypes
import json
import math
import secrets
import signal
import time
import webbrowser
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import urlencode

import aiohttp
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.run.metrics import EvaluationRecord, Metrics, StepRecord
from rljob_api.run.trajectories import SampleRow
from rljob_api.wire.driver_status import DriverStatus
from rljob_cli.output import say
from rljob_cli.report.charts import Chart, describe_panels, find_tails
from rljob_cli.report.collect import add_agent, collect_run
from rljob_cli.report.page import Choices, LiveView, list_choices, render_page
from rljob_cli.report.samples import describe_sample
from rljob_cli.run.curves import lay_over
from rljob_cli.run.snapshot import describe_groups
from rljob_cli.trajectories.index import LANES, ORDERS, SHOWN, Query
from rljob_cli.ui.runs import WatchedRun, find_differences


class Cursor(NamedTuple):
    """What a page has: so many steps and evaluations, the last one ended at `time`, and samples of a feed."""

    num_steps: int = 0
    num_evaluations: int = 0
    time: int = 0
    """Milliseconds since 1970."""
    feed: str = "-"
    number: int = 0
    """The first sample of the feed that the page does not have."""

    def __str__(self) -> str:
        return ".".join(map(str, self))


def parse_cursor(text: str) -> Cursor:
    """Return the cursor of a page; the beginning, if it is none of ours."""
    parts = text.split(".")
    try:
        steps, evaluations, time, feed, number = parts
        return Cursor(int(steps), int(evaluations), int(time), feed, int(number))
    except ValueError:
        return Cursor()


class Event(NamedTuple):
    kind: str
    """records, restarted, samples or status."""
    data: dict[str, Any]

    def encode(self, cursor: Cursor) -> bytes:
        """Return the event as a server sends it; the browser sends the cursor back when it reconnects."""
        text = json.dumps(self.data, ensure_ascii=False)
        return f"event: {self.kind}\nid: {cursor}\ndata: {text}\n\n".encode()


def begin(metrics: Metrics) -> Cursor:
    """Return the cursor of a page that was rendered with these records."""
    last = max((record.time or 0.0 for part in (metrics.steps, metrics.evaluations) for record in part[-1:]), default=0)
    return Cursor(len(metrics.steps), len(metrics.evaluations), int(1000 * last))


def find_records(metrics: Metrics, cursor: Cursor) -> tuple[list[Event], Cursor]:
    """Return what the page does not have of metrics.jsonl."""
    now = begin(metrics)._replace(feed=cursor.feed, number=cursor.number)
    if now == cursor:
        return [], cursor
    known = Metrics(metrics.steps[: cursor.num_steps], metrics.evaluations[: cursor.num_evaluations])
    if begin(known)[:3] != cursor[:3]:
        return [Event("restarted", {"line": "the run continues from an earlier step"})], now
    new = metrics.evaluations[cursor.num_evaluations :] or metrics.steps[cursor.num_steps :]
    return [Event("records", {"line": _describe_record(new[-1])})], now


def find_samples(feed: str, following: int, samples: Sequence[SampleRow], cursor: Cursor) -> tuple[list[Event], Cursor]:
    """Return the scored samples that the page does not have. `following`: the number after that of the last one."""
    first = following - len(samples)
    number = cursor.number if cursor.feed == feed else first
    if not feed or (cursor.feed == feed and number >= following):
        return [], cursor
    new = samples[max(0, number - first) :]
    data = {"samples": [describe_sample(add_agent(row)) for row in new], "lost": max(0, first - number)}
    return [Event("samples", data)] if new else [], cursor._replace(feed=feed, number=following)


def describe_status(status: DriverStatus | None) -> dict[str, Any]:
    """Return who waits for whom, as rows of role and text."""
    if status is None:
        return {"is_running": False, "rows": []}
    rows = [("steps", f"{status.step} of {status.total_steps} have ended")] if status.total_steps else []
    rows += [("driver", ": ".join(filter(None, [status.phase, status.waits_for])))]
    rows += [(part.role, f"{part.name} hangs for {part.seconds:.0f} s; {part.doing}") for part in status.hung]
    rows += [(each.what, f"is away for {each.seconds:.0f} s: {each.message}") for each in status.outages]
    schedule = status.schedule
    if known := describe_groups(schedule):
        rows.append(("groups", known))
    for name, demand in status.demand.items():
        text = f"{demand.in_flight} in flight, {demand.waiting} wait for a replica"
        oldest = f", the oldest for {demand.oldest_in_flight_seconds:.1f} s" if demand.in_flight else ""
        rows.append((f"requests of {name}", text + oldest))
    if busy := schedule.busy.describe():
        rows.append(("at work in the last step", busy))
    return {"is_running": True, "rows": rows}


def _describe_record(record: StepRecord | EvaluationRecord) -> str:
    if isinstance(record, EvaluationRecord):
        accuracy = "no accuracy" if record.accuracy is None else f"accuracy {record.accuracy:.3f}"
        return f"evaluation after step {record.step}, {accuracy}"
    parts = [f"step {record.step}"]
    parts += [] if record.reward is None else [f"reward {record.reward:.3f}"]
    parts += [] if record.step_seconds is None else [f"{record.step_seconds:.1f} s"]
    return ", ".join([*parts, *([f"{record.num_invalid} invalid"] if record.num_invalid else [])])


_M_ARENA_MAX = -8
"""The number of arenas, a parameter of glibc's mallopt."""
_REFRESH_SECONDS = 0.7
_SILENT_SECONDS = 15.0
"""Without an event for so long, a comment shows that the connection is alive."""
_MAX_SAMPLES = 100
"""Limit of one page."""
_MAX_FILES = 40
"""Files of the log that the page's failures and times of rewards are from."""
_NEW_FILES = 400
"""A request for samples reads so many further files: under a second. The page asks again until all are read."""
_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class Page(NamedTuple):
    """One page of samples, as the page shows it."""

    total: int
    matching: int
    samples: list[dict[str, Any]]
    unread: int = 0
    """Files that the next request reads: what they have is not counted yet."""
    nearest: str = ""
    """If the step of the query has no samples: the nearest one that has some, as `3 train`."""
    damaged: list[str] = []
    """Files that cannot be read."""


class UiServer:
    def __init__(self, read_runs: Callable[[], Mapping[str, WatchedRun]]) -> None:
        self._read_runs = read_runs
        self._key = secrets.token_urlsafe(12)
        self._session: aiohttp.ClientSession | None = None
        self._looked: defaultdict[str, float] = defaultdict(lambda: -math.inf)
        """When the head of a run was asked last."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        app = web.Application()
        app.router.add_get("/favicon.ico", self._no_icon)
        app.router.add_get(f"/{self._key}/", self._page)
        app.router.add_get(f"/{self._key}/sections", self._page)
        app.router.add_get(f"/{self._key}/samples", self._samples)
        app.router.add_get(f"/{self._key}/events", self._events)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)

    async def start(self, port: int) -> str:
        """Return the address of the page. `port`: 0 chooses a free one."""
        self._session = aiohttp.ClientSession()
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, "127.0.0.1", port).start()
        except OSError as error:
            await self.close()
            raise UserError(f"cannot listen on 127.0.0.1:{port}: {error.strerror}; pass another --port") from None
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/{self._key}/"

    async def close(self) -> None:
        await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _no_icon(self, _: web.Request) -> web.Response:
        return web.Response(status=204)

    async def _page(self, request: web.Request) -> web.Response:
        """Return the page, or its sections without what the page has already: program, style and curves."""
        runs = await asyncio.to_thread(self._read_runs)
        run = _choose(runs, request)
        is_whole = request.path.endswith("/")
        async with self._locks[run.name]:
            try:
                text = await asyncio.to_thread(render_live, run, runs, _choose_others(runs, request), is_whole=is_whole)
            except UserError as error:  # its folder was deleted meanwhile, or another version has written it
                raise web.HTTPConflict(text=f"{error}\n") from None
        _return_memory()
        return web.Response(text=text, content_type="text/html", headers=_HEADERS)

    async def _samples(self, request: web.Request) -> web.Response:
        run = _choose(await asyncio.to_thread(self._read_runs), request)
        query, offset, limit = _read_query(request.query)
        async with self._locks[run.name]:
            page = await asyncio.to_thread(read_page, run, query, offset, limit)
        _return_memory()
        return web.json_response(page._asdict(), headers=_HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send what the page does not have, until it is closed."""
        runs = await asyncio.to_thread(self._read_runs)
        run, others = _choose(runs, request), [runs[name] for name in _choose_others(runs, request)]
        cursor = parse_cursor(request.headers.get("Last-Event-ID") or request.query.get("after", ""))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"} | _HEADERS)
        await response.prepare(request)
        status: Event | None = None
        sent_at = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            while True:
                news, cursor = await self._find_news(run, others, cursor)
                if (now := Event("status", describe_status(run.head.status))) != status:
                    status = now
                    news.append(now)
                news = await asyncio.to_thread(_hide_secrets, run, news)
                if news or time.monotonic() > sent_at + _SILENT_SECONDS:
                    await response.write(b"".join(each.encode(cursor) for each in news) or b": alive\n\n")
                    sent_at = time.monotonic()
                await asyncio.sleep(_REFRESH_SECONDS)
        return response

    async def _find_news(
        self, run: WatchedRun, others: Sequence[WatchedRun], cursor: Cursor
    ) -> tuple[list[Event], Cursor]:
        await self._look(run)
        metrics, known = await asyncio.to_thread(run.read_metrics), cursor
        records, cursor = find_records(metrics, cursor)
        if records:
            async with self._locks[run.name]:
                records = [await asyncio.to_thread(add_charts, each, run, others, known) for each in records]
        samples, cursor = find_samples(run.head.feed, run.head.next, tuple(run.head.samples), cursor)
        return [*records, *samples], cursor

    async def _look(self, run: WatchedRun) -> None:
        """Ask the head, once for all pages."""
        assert self._session is not None
        async with self._locks[f"head of {run.name}"]:
            if time.monotonic() >= self._looked[run.name] + _REFRESH_SECONDS / 2:
                await run.head.refresh(self._session)
                self._looked[run.name] = time.monotonic()


def _call_libc(function: str, *arguments: int) -> None:
    with contextlib.suppress(AttributeError):  # another C library
        getattr(ctypes.CDLL(None), function)(*arguments)


def _return_memory() -> None:
    """Give back what a request needed. glibc keeps it, 100 MB of a long run."""
    _call_libc("malloc_trim", 0)


def _choose(runs: Mapping[str, WatchedRun], request: web.Request) -> WatchedRun:
    """Return the run of a request; without a name, the one that has changed last."""
    name = request.query.get("run")
    if not runs:
        raise web.HTTPNotFound(text="no run is left: their folders were deleted\n")
    if name is None:
        return max(runs.values(), key=WatchedRun.changed_at)
    if name not in runs:
        raise web.HTTPNotFound(text=f"no run has the name {name}\n")
    return runs[name]


def _choose_others(runs: Mapping[str, WatchedRun], request: web.Request) -> list[str]:
    """Return the runs that are laid over the one that is shown."""
    shown = _choose(runs, request).name
    return [name for name in dict.fromkeys(request.query.getall("with", [])) if name in runs and name != shown]


def describe_charts(run: WatchedRun, others: Sequence[WatchedRun], known: Cursor | None = None) -> list[Chart]:
    """Return the charts. `known`: those that a page with this cursor has; of other runs the curves as they are now."""
    panels = run.build_panels(*(known or ())[:2])
    if others:
        panels = lay_over({run.name: panels} | {other.name: other.build_panels() for other in others})
    return describe_panels(panels)


def add_charts(event: Event, run: WatchedRun, others: Sequence[WatchedRun], known: Cursor) -> Event:
    """Return the event of new records with the points that a page does not have."""
    before = describe_charts(run, others, known) if event.kind == "records" else []
    return event._replace(data=event.data | {"charts": find_tails(before, describe_charts(run, others))})


def render_live(
    run: WatchedRun, runs: Mapping[str, WatchedRun], others: Sequence[str], *, is_whole: bool = True
) -> str:
    metrics = run.read_metrics()
    cursor = begin(metrics)  # before what follows, so that the page may get a step twice, and misses none
    found = collect_run(run.folder, answers=run.answers, metrics=metrics, max_files=_MAX_FILES)
    shown = list_choices(chain.from_iterable(found.samples))
    rewards = dict.fromkeys([*(name for step in metrics.steps for name in step.rewards), *shown.rewards])
    reasons = {*(reason for record in metrics.records for reason in record.invalid_by_reason), *shown.reasons}
    order, differences = list(runs), find_differences({name: each.settings() for name, each in runs.items()})
    charts = describe_charts(run, [runs[name] for name in others], cursor) if is_whole else None
    live = LiveView(
        name=run.name,
        runs=[each.describe()._replace(differs=differences[name]) for name, each in runs.items()],
        colours={name: order.index(name) for name in (run.name, *others)},
        choices=Choices(list(rewards), sorted(reasons)),
        query=urlencode([("run", run.name), *(("with", name) for name in others)]),
        cursor=str(cursor),
        charts=charts,
    )
    return render_page(found, datetime.now().astimezone(), live)


def read_page(run: WatchedRun, query: Query, offset: int, limit: int) -> Page:
    run.index.read(query, _NEW_FILES)
    found, total = run.index.select(query), len(run.index.select(Query(query.step, query.lane)))
    if query.text:
        found = run.index.find_text(found, query.text)
    rows = run.index.read_samples(found[offset : offset + limit])
    samples = run.redactor().redact([describe_sample(add_agent(row)) for row in rows])
    step, files = query.step, run.index.files
    nearest = ""
    if step is not None and files and not any(map(query.reads, files)):
        best = min(files, key=lambda file: (abs(file.step - step), file.lane != query.lane))
        nearest = f"{best.step} {best.lane}"
    return Page(total, len(found), samples, run.index.num_unread, nearest, sorted(run.index.damaged))


def _hide_secrets(run: WatchedRun, news: Sequence[Event]) -> list[Event]:
    return [each._replace(data=run.redactor().redact(each.data)) for each in news]


def _read_query(fields: Mapping[str, str]) -> tuple[Query, int, int]:
    """Return the query, the offset and the limit of the page's filters. Raise HTTPBadRequest."""
    step, group = fields.get("step"), fields.get("group")
    try:
        query = Query(
            step=int(step) if step else None,
            group=int(group) if group else None,
            lane=_read_choice(fields, "lane", LANES) or None,
            reward=fields.get("reward") or None,
            reason=fields.get("reason") or None,
            shown=_read_choice(fields, "show", SHOWN),
            low=float(fields["low"]) if fields.get("low") else None,
            high=float(fields["high"]) if fields.get("high") else None,
            text=fields.get("text", ""),
            order=_read_choice(fields, "order", ORDERS),
        )
        offset, limit = int(fields.get("offset", "0")), int(fields.get("limit", "40"))
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"{error}\n") from None
    return query, max(0, offset), max(0, min(limit, _MAX_SAMPLES))


def _read_choice(fields: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    if (value := fields.get(name, "")) not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)[2:]}, got {value}")
    return value


async def serve(read_runs: Callable[[], Mapping[str, WatchedRun]], port: int, should_open: bool) -> int:
    """Serve the page until Ctrl-C."""
    _call_libc("mallopt", _M_ARENA_MAX, 1)  # each thread would keep an arena, 8 MB in all
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
    server = UiServer(read_runs)
    url = await server.start(port)
    try:
        print(f"{url}\nonly this machine can open it, with this address; Ctrl-C ends it", flush=True)
        if should_open and not await asyncio.to_thread(webbrowser.open, url):
            say(f"no browser was found; open {url}")
        await ended.wait()
    finally:
        await server.close()
    return 0
