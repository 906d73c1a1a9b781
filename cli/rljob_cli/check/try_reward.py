"""`rljob test-reward`: scores completions in the same server that training uses, and starts nothing else.

If the reward scores groups, rows with the same `group`, or else the same prompt, form one. Invariant: when it returns,
no process that it started is alive.
"""

import asyncio
import contextlib
import itertools
import json
import re
import tempfile
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from rljob_api.errors import RLJobError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_spec import Service
from rljob_api.manifest.services.reward import Reward
from rljob_api.manifest.sources import parse_source
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreRequest, ScoreResult
from rljob_cli.check.jobfile import check_file, load
from rljob_cli.check.rewards import check_service
from rljob_cli.check.samples import SampleBuilder, load_job_tokenizer
from rljob_cli.check.score_client import describe_guess, read_info, score_all
from rljob_cli.check.waits import LIMIT_SECONDS, describe_end, find_import_place, report_waits, wait_until_ready
from rljob_cli.exits import EXIT_FAILED, EXIT_INTERRUPTED
from rljob_cli.local.cluster import LOCAL_DEFAULTS, LocalCluster, running
from rljob_cli.local.network import Network, claim_block
from rljob_cli.local.node.container import is_marker
from rljob_cli.manifests import labels_of
from rljob_cli.options import TryRewardOptions
from rljob_cli.output import print_json, say, to_text
from rljob_cli.tables import make_console
from rljob_core.backend import Manifest
from rljob_core.children.common import read_service_name
from rljob_core.children.pods import VLLM_CONTAINER
from rljob_core.plan.job import render_children
from rljob_inputs.data.columns import read_answer
from rljob_inputs.data.conversations import are_messages
from rljob_inputs.data.files import find_files, find_kind, is_saved, read_file
from rljob_inputs.data.rows import read_rows
from rljob_inputs.data.text_files import LINES, Values, read_text_file
from rljob_inputs.machine.installation import require
from rljob_inputs.memory.sharing import change_job

TOKEN = "test-reward"
_STOP_SECONDS = 3.0
_MIN_CHARACTERS = 60
"""Minimum of a completion or an answer that the table on a terminal shows at least."""


@dataclass(frozen=True)
class Outcome:
    label: str
    """The number of the sample, or of the group and the sample in it."""
    request: ScoreRequest
    result: ScoreResult

    def to_json(self) -> dict[str, Any]:
        result = self.result.model_dump(mode="json", exclude={"id"})
        return {
            "sample": self.label,
            "completion": self.request.completion,
            "ground_truth": self.request.ground_truth,
        } | result


def try_reward_command(options: TryRewardOptions) -> int:
    """Score with all rewards, or with the one that is named, print the results, and return 1 if one is invalid."""
    require("rljob test-reward", "data")
    job_file = load(options.files.path, options.overrides or [])
    chosen = _find_rewards(job_file.job, options.reward)
    answer = _read_answer(job_file.job, options.answer)
    rows = _read_rows(options.completion or [], answer, options.prompt, options.file)
    samples = SampleBuilder(job_file.job, load_job_tokenizer(job_file.job))
    services = [Service("reward", f"spec.rewards[{index}]", reward) for index, reward in chosen]
    check_file(job_file, itertools.chain.from_iterable(map(check_service, services)))
    found: dict[str, list[Outcome]] = {}
    shown = []
    for _, reward in chosen:
        built = build_groups(rows, samples, in_groups=reward.scope != "sample")
        groups = [each for each in built if reward.scores_row(each[0].extra_info, each[0].data_source)]
        if left_out := len(built) - len(groups):
            say(f"reward {reward.name}: teacher.when leaves out {left_out} of {len(built)} rows")
        if not groups:
            found[reward.name] = []
            continue
        column = job_file.job.spec.data.train.answer
        if missing := sum(request.ground_truth is None for group in groups for request in group) if column else 0:
            say(f"warning: {missing} rows have no answer: none in {column} (data.train.answer), answer or ground_truth")
        with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
            network = claim_block(folder, options.network)
            try:
                outcomes, printed = asyncio.run(_score(job_file.job, reward, groups, network, Path(folder)))
            except (KeyboardInterrupt, asyncio.CancelledError):
                return EXIT_INTERRUPTED
        found[reward.name] = outcomes
        results = [outcome.to_json() for outcome in outcomes]
        shown.append({"reward": reward.name, "results": results, "printed": printed})
        if options.output != "json":
            _print_outcomes(reward.name, outcomes, printed)
    totals = sum_up({reward.name: reward.weight for _, reward in chosen if not reward.teacher}, found)
    if options.output == "json":
        print_json(shown[0] if len(shown) == 1 else {"rewards": shown, "scores": totals})
    elif len(shown) > 1:
        table = Table("sample", "score", title="weighted sum", title_justify="left")
        for number, total in enumerate(totals, start=1):
            table.add_row(str(number), "-" if total is None else f"{total:.4g}")
        make_console().print(table)
    return 0 if all(each.result.valid for each in itertools.chain(*found.values())) else EXIT_FAILED


def sum_up(weights: Mapping[str, float], found: Mapping[str, Sequence[Outcome]]) -> list[float | None]:
    """Return the sum of each row by these weights, without rewards that abstain from it; None if one is invalid, or all
    abstain."""
    rows: dict[str, list[tuple[float, ScoreResult]]] = {}
    for name in weights:
        for outcome in found[name]:
            rows.setdefault(outcome.request.id, []).append((weights[name], outcome.result))
    totals: list[float | None] = []
    for number in range(len(rows)):
        scored = [each for each in rows[f"test-{number}"] if each[1].reason is not InvalidReason.ABSTAINED]
        is_known = bool(scored) and all(result.valid for _, result in scored)
        totals.append(sum(weight * (result.score or 0.0) for weight, result in scored) if is_known else None)
    return totals


def _read_answer(job: RLJob, text: str | None) -> Any:
    """Return --answer with the type that the data's answers have, as far as this machine has the data."""
    source = job.spec.data.train
    if text is not None and source.answer and parse_source(source.source).kind == "absolute":
        with contextlib.suppress(RLJobError, ValueError):
            row = next(read_rows(source, source.source, split="train"))
            return text if isinstance(read_answer(source, row, "spec.data.train"), str) else json.loads(text)
    return text


def _print_outcomes(name: str, outcomes: list[Outcome], printed: str) -> None:
    console = make_console()
    limit = max(_MIN_CHARACTERS, console.width // 3) if console.is_terminal else None
    console.print(build_table(name, outcomes, limit))
    if printed:
        console.print("output of the reward's server:", style="bold")
        console.print(printed, markup=False, highlight=False, soft_wrap=True)


def _find_rewards(job: RLJob, name: str | None) -> list[tuple[int, Reward]]:
    served = [(i, reward) for i, reward in enumerate(job.spec.rewards) if reward.is_served]
    if chosen := [each for each in served if name in (None, each[1].name)]:
        return chosen
    if not job.spec.rewards:
        raise UserError("the job has no rewards; `rljob test-agent` plays an episode of an agent that rewards it")
    names = ", ".join(reward.name for _, reward in served) or "none"
    got = f", got {name}" if name else ""
    raise UserError(f"--reward must be a reward that the job serves{got}; it serves {names}")


def _read_rows(completions: list[str], answer: Any, prompt: str, file: Path | None) -> list[dict[str, Any]]:
    if (file is None) == (not completions):
        raise UserError("pass either --completion (with --answer) or --file")
    if file is None:
        return [{"completion": completion, "answer": answer, "prompt": prompt} for completion in completions]
    if not file.exists():
        find_files(file)  # raises with a near name
    read = read_file(file, "train") if find_kind(file) or is_saved(file) else read_text_file(file, LINES)
    rows = [_check_row(values, place) for values, place in read]
    if not rows:
        raise UserError(f"{file} has no rows")
    return rows


def _check_row(row: Values, place: str) -> Values:
    if not isinstance(row.get("completion"), str):
        raise UserError(f"{place}: must have the text `completion`")
    prompt = row.get("prompt") or ""
    if not isinstance(prompt, str) and not are_messages(prompt):
        raise UserError(f"{place}: `prompt` must be a string or a list of {{role, content}} messages")
    for name in ("prompt_ids", "completion_ids"):
        ids = row.get(name, [])
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            raise UserError(f"{place}: `{name}` must be a list of whole numbers")
    return row


def build_groups(rows: list[dict[str, Any]], samples: SampleBuilder, *, in_groups: bool) -> list[list[ScoreRequest]]:
    """Build the driver's requests: one list per group, or per row unless the reward scores groups."""
    if not in_groups:
        return [[samples.build_row(f"test-{index}", row, index)] for index, row in enumerate(rows)]
    groups: dict[str, list[ScoreRequest]] = {}
    for index, row in enumerate(rows):
        key = json.dumps(row.get("group", row.get("prompt") or ""))
        own = {name: value for name, value in row.items() if name != "group"}
        groups.setdefault(key, []).append(samples.build_row(f"test-{index}", own, index))
    return list(groups.values())


def reward_children(job: RLJob, reward: Reward) -> list[Manifest]:
    """Return the planned objects of one reward with one replica, and the Secret with the token."""
    single = reward.model_copy(update={"replicas": 1})
    rewards = [single if other.name == reward.name else other for other in job.spec.rewards]
    job = job.with_spec(rewards=rewards)
    return service_children(job, {reward.name})


def service_children(job: RLJob, names: Container[str]) -> list[Manifest]:
    """Return the planned objects of the services with these names, and the Secret with the token."""
    children = render_children(_without_trainer(job), TOKEN, defaults=LOCAL_DEFAULTS)
    kinds = ("ConfigMap", "Service", "Deployment")
    own = [c for c in children if c["kind"] in kinds and read_service_name(labels_of(c)) in names]
    return [child for child in children if child["kind"] == "Secret"] + own


def _without_trainer(job: RLJob) -> RLJob:
    """Return the job whose served models run next to their servers, wherever they run in training."""
    placements = {f"{path.removeprefix('spec.')}.placement": "separate" for path in job.spec.models_in_trainer}
    return change_job(job, placements) if placements else job


async def _score(
    job: RLJob, reward: Reward, groups: list[list[ScoreRequest]], network: Network, folder: Path
) -> tuple[list[Outcome], str]:
    cluster = LocalCluster(job, network, folder)
    children = reward_children(job, reward)
    progress = report_waits(cluster, {reward.name: f"reward {reward.name}"}, say)
    async with running(cluster, children, _STOP_SECONDS, progress):
        limit = LIMIT_SECONDS if reward.function and not reward.function.requirements else None
        try:
            async with asyncio.timeout(limit):
                url = await wait_until_ready(cluster, reward.name, describe_end)
        except TimeoutError:
            where = find_import_place(cluster, reward.name)
            raise UserError(f"reward {reward.name}: its import did not end within {limit:g} s{where}") from None
        if guess := describe_guess(reward, await read_info(url, TOKEN)):
            say(f"reward {reward.name}: {guess}")
        results = await score_all(url, TOKEN, job, reward, groups, say)
    return label_outcomes(groups, results, in_groups=reward.scope != "sample"), collect_output(folder / "logs")


def label_outcomes(
    groups: list[list[ScoreRequest]], results: list[list[ScoreResult]], *, in_groups: bool
) -> list[Outcome]:
    return [
        Outcome(f"{number}.{place}" if in_groups else _find_number(request), request, result)
        for number, (requests, scored) in enumerate(zip(groups, results, strict=True), start=1)
        for place, (request, result) in enumerate(zip(requests, scored, strict=True), start=1)
    ]


def _find_number(request: ScoreRequest) -> str:
    return str(int(request.id.removeprefix("test-")) + 1)


_LINE_OF_SERVER = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO ")


def collect_output(logs: Path, pattern: str = "*.log") -> str:
    """Return what the function printed, and the server's warnings, without markers and vLLM's log."""
    files = (log for log in sorted(logs.glob(pattern)) if not log.name.endswith(f".{VLLM_CONTAINER}.log"))
    lines = [line for log in files for line in log.read_text(errors="replace").splitlines()]
    return "\n".join(line for line in lines if not (is_marker(line) or _LINE_OF_SERVER.match(line)))


def build_table(name: str, outcomes: list[Outcome], limit: int | None = None) -> Table:
    """Build the table of the results, with texts of at most `limit` characters."""
    components = sorted({key for outcome in outcomes for key in outcome.result.components})
    table = Table(title=f"reward {name}", title_justify="left")
    for column in ("#", "completion", "answer", "score", *components, "latency", "invalid"):
        table.add_column(column, overflow="fold")
    for outcome in outcomes:
        result = outcome.result
        cells = [
            outcome.label,
            *(_to_text(text, limit) for text in (outcome.request.completion, outcome.request.ground_truth)),
        ]
        cells.append("-" if result.score is None else f"{result.score:.4g}")
        cells += [f"{result.components[key]:.4g}" if key in result.components else "-" for key in components]
        invalid = f"{result.reason}: {result.message}" if result.reason else ""
        cells += [f"{1000 * result.execute_seconds:.1f} ms", invalid]
        table.add_row(*cells)
    return table


def _to_text(value: Any, limit: int | None) -> str:
    text = "" if value is None else to_text(value)
    return text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…"
