"""`rljob test-agent`: plays episodes on one row of the data and shows each turn. The base model or the user answers.

Trains nothing. The episodes are rows of a trajectory log, so they look as those of a run.

The base model plays in an evaluation of a local run, which is stopped before it trains; the sampling is that of
training. With given answers, the trainer's rehearsal takes the place of the head's program: user, tools, runner and
rewards are in their servers, the loop and the clients are those of training, and there is no model. A row of an
environment is read from the runner's server as the head does. Invariant: when `play_model`, `play_answers` or
`read_env_row` returns or raises, no process that it started is alive.
"""

import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.text import Text

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_sections import DataSource
from rljob_api.manifest.services.runner import RUNNER_SERVICE, Runner
from rljob_api.run.folder import TRAJECTORIES, list_trajectory_files
from rljob_api.run.trajectories import SampleRow
from rljob_api.wire.calls import CallRequest, CallResult, RowsCall, RowsReply
from rljob_api.wire.contract import LABEL_ROLE, READ_ROWS, UrlPath
from rljob_cli.check.job_source import require_weights
from rljob_cli.check.jobfile import check_file, load
from rljob_cli.check.preflight import locate
from rljob_cli.check.rewards import check_service
from rljob_cli.check.try_reward import TOKEN, collect_output, service_children
from rljob_cli.check.waits import (
    describe_end,
    describe_error,
    find_ended_container,
    report,
    report_waits,
    wait_until_ready,
)
from rljob_cli.commands import parse_claims, shorten, use_fast_types
from rljob_cli.exits import EXIT_FAILED, EXIT_INTERRUPTED
from rljob_cli.local.cluster import LOCAL_DEFAULTS, LocalCluster, replace_head, running
from rljob_cli.local.network import claim_block
from rljob_cli.manifests import is_ready, labels_of, phase_of, role_of
from rljob_cli.options import TryAgentOptions
from rljob_cli.output import print_json, say
from rljob_cli.run import runfolder
from rljob_cli.run.command import STOPPED, Run
from rljob_cli.run.live import PlainOutput
from rljob_cli.tables import make_error_console, show
from rljob_cli.trajectories.conversation import LEGEND, build_conversation
from rljob_cli.trajectories.index import Query, read_rows
from rljob_core.backend import Manifest
from rljob_core.children.common import AGENT, HEAD, REWARD, child_name, read_role_name
from rljob_core.plan.job import render_children
from rljob_inputs.data import rows as data_rows
from rljob_inputs.data.prompts import find_data_source
from rljob_inputs.machine.installation import require

_SETTINGS = "rehearsal.json"
_KINDS = ("Secret", "ConfigMap", "Service", "Deployment", "Job")
_POLL_SECONDS = 0.05
_END_SECONDS = 3.0


def find_playable(job: RLJob) -> list[str]:
    """Return the names of the rewards whose servers need no model: functions, judges with an endpoint, and URLs."""
    return [r.name for r in job.spec.rewards if r.function or r.http or r.endpoint]


def play_answers(
    job: RLJob, answers: Sequence[str], folder: Path, claims: Mapping[str, Path], block: str | None
) -> None:
    """Play one episode on the first row of data.train. It is then in the trajectory log of `folder`."""
    rewards = find_playable(job)
    (folder / _SETTINGS).write_text(json.dumps({"answers": list(answers), "rewards": rewards}))
    network = claim_block(str(folder), block)
    asyncio.run(_play_objects(LocalCluster(job, network, folder, claims), build_rehearsal(job, rewards)))


def build_rehearsal(job: RLJob, rewards: Collection[str]) -> list[Manifest]:
    """Return the job's objects without trainers, rollouts and other rewards. The head's Pod has another program."""
    names = {HEAD, *(f"{REWARD}-{name}" for name in rewards)}

    def keeps(child: Manifest) -> bool:
        labels = labels_of(child)
        is_wanted = labels.get(LABEL_ROLE, AGENT) == AGENT or read_role_name(labels) in names
        return child["kind"] in _KINDS and is_wanted

    kept = [child for child in render_children(job, "local", defaults=LOCAL_DEFAULTS) if keeps(child)]
    for child in kept:
        if child["kind"] == "Deployment":
            child["spec"]["replicas"] = 1
    replace_head(kept, "rljob_trainer.rehearsal", _SETTINGS)
    return kept


async def _play_objects(cluster: LocalCluster, children: Sequence[Manifest]) -> None:
    async with running(cluster, children, _END_SECONDS, report(say, partial(_describe_wait, cluster))):
        await _wait_until_played(cluster)


async def _wait_until_played(cluster: LocalCluster) -> None:
    """Raise UserError with its log if a container ends before the episode does."""
    while True:
        cluster.check()
        for pod in cluster.store.pods.values():
            if role_of(pod) == HEAD and phase_of(pod) == "Succeeded":
                return
            if ended := find_ended_container(pod):
                raise UserError((describe_error if role_of(pod) == HEAD else describe_end)(pod, ended))
        await asyncio.sleep(_POLL_SECONDS)


def _describe_wait(cluster: LocalCluster, seconds: float) -> str:
    pods = [pod for pod in cluster.store.pods.values() if role_of(pod) != HEAD]
    starting = sorted(role_of(pod) for pod in pods if not is_ready(pod))
    what = f"the start of {', '.join(starting)}" if starting else "the end of the episode"
    return f"waits for {what} ({seconds:.0f} s)"


_STOP_SECONDS = 1.0
_NUM_SHOWN = 500


def read_env_row(
    job: RLJob,
    source: DataSource,
    field: str,
    number: int,
    claims: Mapping[str, Path],
    say: Callable[[str], None],
    block: str | None = None,
) -> dict[str, Any]:
    """Return row `number` of an env:// source, from 0. Raise UserError if the environment does not return it, or its
    server does not start. `field`: spec.data.train."""
    assert source.env_split is not None
    place = f"{field}.source: {source.source}"
    if source.limit is not None and number >= source.limit:
        raise UserError(f"{place}: --row {number}: limit is {source.limit}")
    call = RowsCall(split=source.env_split, start=source.offset + number, count=1)
    runner = (job.spec.agent.runner or Runner()).model_copy(update={"replicas": 1, "autoscaling": None, "slots": 1})
    agent = job.spec.agent.model_copy(update={"runner": runner})
    job = job.with_spec(agent=agent)
    with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
        cluster = LocalCluster(job, claim_block(folder, block), Path(folder), claims)
        result = asyncio.run(_read(cluster, service_children(job, {RUNNER_SERVICE}), call, say))
    if not result.valid:
        raise UserError(f"{place}: the environment gave no rows: {result.message}")
    rows = RowsReply.model_validate(result.value, extra="ignore").rows
    if not rows:
        raise UserError(f"{place}: --row {number}: it has fewer rows; name another split, or a lower number")
    return rows[0]


async def _read(
    cluster: LocalCluster, children: Sequence[Manifest], call: RowsCall, say: Callable[[str], None]
) -> CallResult:
    async with running(cluster, children, _STOP_SECONDS, report_waits(cluster, {RUNNER_SERVICE: "the runner"}, say)):
        return await _ask(await wait_until_ready(cluster, RUNNER_SERVICE), call)


async def _ask(url: str, call: RowsCall) -> CallResult:
    request = CallRequest(id="row", function=READ_ROWS, arguments=call.model_dump())
    headers, timeout = {"Authorization": f"Bearer {TOKEN}"}, aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session,
        session.post(UrlPath.CALL, json=request.model_dump(mode="json")) as response,
    ):
        body = await response.read()
    if response.status != 200:
        raise UserError(f"the runner answered {response.status}: {body.decode(errors='replace')[:_NUM_SHOWN]}")
    return CallResult.model_validate_json(body, extra="ignore")


def try_agent_command(options: TryAgentOptions) -> int:
    """Play, print, and return 1 if an episode or a result is invalid."""
    require("rljob test-agent")
    answers, block = options.completion or [], options.network
    file, claims = load(options.files.path, options.overrides or []), parse_claims(options.volumes)
    require_weights(None if answers else file.start)
    if file.job.spec.agent.type == "singleTurn":
        remedy = "`rljob test-reward` scores single answers"
        raise UserError(f"{file.path}: spec.agent.type must be loop, program or environment; {remedy}")
    if answers and options.episodes != 1:
        raise UserError("--episodes is for the base model; given answers are one episode")
    check_file(file, (finding for service in file.job.spec.services for finding in check_service(service)))
    try:
        values = read_row(file.job, options.row, claims, block)
        with _scratch_folder() as folder:
            job = place_row(file.job, values, options.episodes, folder)
            found = _play(job, answers, folder, claims, block)
            printed = collect_output(folder / "logs", f"{child_name(job, AGENT)}-*.log")
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_INTERRUPTED
    if options.output == "json":
        print_json({"episodes": [row.model_dump() for row in found], "printed": printed})
    else:
        for row in found:
            show(build_conversation(row, full=options.full, tokens=True))
        for line in (LEGEND, *describe_rest(found, file.job, answers)):
            show(line)
        if printed:
            show(Text(f"output of the agent's programs:\n{printed}"))
    return EXIT_FAILED if any(map(is_invalid, found)) else 0


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A folder that is removed at the end, unless a TransientError names its logs."""
    folder = Path(tempfile.mkdtemp(prefix="rljob-"))
    try:
        yield folder
    except TransientError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _play(
    job: RLJob, answers: Sequence[str], folder: Path, claims: dict[str, Path], block: str | None
) -> list[SampleRow]:
    if answers:
        play_answers(job, answers, folder, claims, block)
    else:
        use_fast_types(job, claims)
        if play_model(job, folder, claims, block, make_error_console()) == "Interrupted":
            raise KeyboardInterrupt
    return list(read_rows(folder / TRAJECTORIES, Query(lane="eval")))


def read_row(job: RLJob, number: int, claims: Mapping[str, Path], block: str | None = None) -> dict[str, Any]:
    """Return the values of one row of data.train, from 0. The runner is started for a row of an environment."""
    train = job.spec.data.train
    if train.env_split is not None:
        return read_env_row(job, train, "spec.data.train", number, claims, say, block)
    location = locate(train.source, claims)
    if location is None:
        raise UserError(f"spec.data.train.source: {train.source} has no local folder; add --volume CLAIM=DIR")
    rows = data_rows.read_rows(train, location, split="train", is_check=True)
    found = next(itertools.islice(rows, number, None), None)
    if found is None:
        raise UserError(f"--row {number}: {train.source} has fewer rows")
    return found.values


def place_row(job: RLJob, values: Mapping[str, Any], episodes: int, folder: Path) -> RLJob:
    """Return the job with copies of one row as its data, sampled as in training. It writes no checkpoint elsewhere.

    A program that fails is not tried again: what it raised is the result.
    The driver reports an evaluation with the step next to it, so that step has as few samples as possible.
    """
    spec = job.spec
    num_prompts = spec.trainer.num_ranks
    line = json.dumps(values, default=str) + "\n"
    agent = spec.agent
    sources: dict[str, Any] = {"mix": [], "curriculum": None}
    # By default the name of the source, which the copies replace.
    data_source = find_data_source(spec.data.train, values)
    if agent.is_hosted:  # a second attempt would start again with the first answer
        runner = (agent.runner or Runner()).model_copy(update={"retries": 0, "replicas": 1})
        agent = agent.model_copy(update={"runner": runner})
    for name, count in (("given_train", num_prompts), ("eval", episodes)):
        file = folder / f"{name}.jsonl"
        file.write_text(line * count)
        # A row of an environment has the split that it comes from.
        changes: dict[str, Any] = {"source": str(file), "subset": None, "revision": None}
        changes["split"] = spec.data.train.env_split
        changes |= {"limit": None, "offset": 0, "data_source": data_source}
        sources[name] = spec.data.train.model_copy(update=changes)
    evaluation = {"sampling": spec.rollout.sampling, "at_start": True, "every_steps": 0, "samples_per_prompt": 1}
    return shorten(job.with_spec(agent=agent, given_data=spec.data.model_copy(update=sources)), **evaluation)


def is_invalid(row: SampleRow) -> bool:
    return row.failure is not None or any(not result.valid for result in row.rewards)


def describe_rest(rows: Sequence[SampleRow], job: RLJob, answers: Sequence[str]) -> list[str]:
    """Return what the rows do not show: rewards that were left out, and answers that were too many or too few."""
    if not answers:
        return []
    left_out = [reward.name for reward in job.spec.rewards if reward.name not in find_playable(job)]
    lines = [f"not scored by {', '.join(left_out)}, which needs a model"] if left_out else []
    # With seats, each row is a trajectory of the same episode: together they used the answers.
    used, limit = sum(len(row.turns or []) for row in rows), job.spec.agent.turn_limit
    if rows and used < len(answers):
        lines.append(f"{len(answers) - used} of {len(answers)} answers were not used: the episode had ended")
    elif any(row.end == "max_turns" and len(row.turns or []) < limit for row in rows):
        lines.append(f"the policy would answer next, up to {limit} times; add --completion")
    return lines


def play_model(job: RLJob, folder: Path, claims: Mapping[str, Path], block: str | None, console: Console) -> str:
    """Play one episode for each row of data.eval; they are then in the trajectory log of `folder`.

    Return the phase: Interrupted after a signal. Raise TransientError if the run ends before the episodes do.
    """
    network = claim_block(str(folder), block)
    runfolder.prepare(folder, job)

    def has_played() -> bool:
        return bool(list_trajectory_files(folder / TRAJECTORIES))

    run = Run(job, folder, network, claims, PlainOutput(console), until=has_played)
    phase = asyncio.run(run.execute())
    if phase not in (STOPPED, "Interrupted"):
        raise TransientError(
            f"the run ended before its first episodes: {run.message or phase}; logs: {folder / 'logs'}"
        )
    return phase
