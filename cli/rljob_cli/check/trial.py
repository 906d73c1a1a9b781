"""One call of each function reward on one row of the data, in the server that training uses.

Finds a form that is unknown, an import that fails or hangs, a call that raises, and the components. Other servers are
only started: of a judge, which checks its template, since a call would cost money or need vLLM; of a simulated user,
tools and a runner, whose calls need a conversation (`rljob test-agent`). Reward models and what needs packages to be
installed are left out. Invariant: when it returns, no process that it started is alive.
"""

import asyncio
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_spec import Service, ServiceKind
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.models import JudgeEndpoint, JudgeReward, UserModel
from rljob_api.manifest.services.reward import Reward
from rljob_api.manifest.services.runner import Runner
from rljob_api.manifest.services.tool import Tool
from rljob_api.manifest.services.user import SimulatedUser
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.contract import FILE_FUNCTION, PORT_SERVICE
from rljob_api.wire.scores import ScoreRequest, ScoreResult
from rljob_cli.check.jobfile import Finding, Target
from rljob_cli.check.samples import SampleBuilder, load_job_tokenizer
from rljob_cli.check.score_client import read_info, score_all
from rljob_cli.check.try_reward import TOKEN, service_children
from rljob_cli.check.waits import LIMIT_SECONDS, find_import_place, report_waits, wait_until_ready
from rljob_cli.local.cluster import LocalCluster, running
from rljob_cli.local.network import claim_block
from rljob_inputs.prompts import Prompt

_STOP_SECONDS = 1.0
_MAX_SHOWN_CHARACTERS = 60
_INLINE_PLACE = re.compile(rf"\S+/{re.escape(FILE_FUNCTION)}:(\d+): ")
"""The place of an error in an inline function, which a Pod has as a file."""
_SKIP = "skip this call with --no-call"

Chat = TypeVar("Chat", JudgeReward, UserModel)
Served = TypeVar("Served", Reward, Runner, SimulatedUser, Tool)


@dataclass(frozen=True)
class Trial:
    """What one reward returned for one row, or what the server of a simulated user, tools or a runner serves."""

    index: int
    """In RLJobSpec.services, which begin with the rewards."""
    name: str
    start_seconds: float
    """Until the server was ready: the program's start and the function's import."""
    result: ScoreResult | None = None
    longer: ScoreResult | None = None
    """The result of a longer answer to the same prompt, scored alone. Only of functions that also score groups."""
    together: tuple[ScoreResult, ...] = ()
    """The results of both answers, scored as one group."""
    error: str = ""
    """Why there is no result."""
    kind: ServiceKind = "reward"
    serves: str = ""
    """The form of the user or the program, or the names of the tools. Empty for a reward."""

    def describe(self) -> str:
        """`reward correct: score 1 (acc 1), ready after 0.8 s`, `tool math: add, multiply, ready after 0.8 s`."""
        if self.kind != "reward" and not self.serves:
            return f"{describe_service(self.kind, self.name)}: not checked, its server took too long to start"
        if self.kind != "reward":
            return f"{describe_service(self.kind, self.name)}: {self.serves}, ready after {self.start_seconds:.1f} s"
        if self.result is None:
            return f"reward {self.name}: started; its model was not asked"
        if self.result.score is None:
            return f"reward {self.name}: no score"
        components = ", ".join(f"{name} {value:.4g}" for name, value in self.result.components.items())
        shown = f" ({components})" if components else ""
        return f"reward {self.name}: score {self.result.score:.4g}{shown}, ready after {self.start_seconds:.1f} s"


def find_callable(job: RLJob) -> list[int]:
    """Return the services whose servers start in a second: functions without packages to install, and judges and model
    users, whose model is not asked."""
    return [index for index, service in enumerate(job.spec.services) if _starts_quickly(service.settings)]


def describe_skipped(job: RLJob) -> list[str]:
    """Return a line for each function that is not called, with the reason."""
    lines = []
    for service in job.spec.services:
        function, name = service.settings.function, describe_service(service.kind, service.settings.name)
        if function is None or _starts_quickly(service.settings):
            continue
        why = "requirements are not installed" if function.requirements else "its ConfigMap is not read"
        command = "test-reward" if service.kind == "reward" else "test-agent"
        lines.append(f"{name}: not called, {why} by this check; `rljob {command}` calls it")
    return lines


def describe_service(kind: ServiceKind, name: str) -> str:
    """`reward correct`, `simulated user`, `tool calculator`, `runner`."""
    return {"user": "simulated user", "runner": "runner"}.get(kind, f"{kind} {name}")


def _starts_quickly(settings: Reward | CallService) -> bool:
    chat = settings.judge if isinstance(settings, Reward) else settings.user_model
    if chat is not None:
        return True
    function = settings.function
    return function is not None and not function.requirements and not function.config_map_key_ref


def call_rewards(
    job: RLJob, prompt: Prompt, say: Callable[[str], None], limit_seconds: float = LIMIT_SECONDS
) -> list[Trial]:
    """Call or start the services of `find_callable`, all at once. `say` gets a line about what is waited for."""
    chosen = find_callable(job)
    if not chosen:
        return []
    job = _without_served_models(job)
    trials = _call_chosen(job, chosen, prompt, say, limit_seconds)
    grouped = [trial.index for trial in trials if trial.longer is not None]
    if not grouped:
        return trials
    found = _call_chosen(_with_groups(job), grouped, prompt, say, limit_seconds)
    together = {trial.index: trial.together for trial in found}
    return [replace(trial, together=together.get(trial.index, ())) for trial in trials]


def _call_chosen(
    job: RLJob, chosen: list[int], prompt: Prompt, say: Callable[[str], None], limit: float
) -> list[Trial]:
    with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
        cluster = LocalCluster(job, claim_block(folder), Path(folder))
        return asyncio.run(_call_all(job, chosen, prompt, cluster, say, limit))


async def _call_all(
    job: RLJob, chosen: list[int], prompt: Prompt, cluster: LocalCluster, say: Callable[[str], None], limit: float
) -> list[Trial]:
    services = {index: job.spec.services[index] for index in chosen}
    names = {each.settings.name: describe_service(each.kind, each.settings.name) for each in services.values()}
    children, progress = service_children(_with_one_worker(job), names), report_waits(cluster, names, say, limit)
    async with running(cluster, children, _STOP_SECONDS, progress, signals=()):
        samples = SampleBuilder(job, await asyncio.to_thread(load_job_tokenizer, job))
        call = partial(_try, prompt=prompt, samples=samples, cluster=cluster, started=time.monotonic(), limit=limit)
        return list(await asyncio.gather(*(call(job, index, each) for index, each in services.items())))


def _with_one_worker(job: RLJob) -> RLJob:
    """Return the job with one Pod and one worker per service: a call needs no more."""
    spec, agent = job.spec, job.spec.agent
    tools = [_single(tool) for tool in agent.tools]
    user = _single(agent.user) if agent.user else None
    runner = _single(agent.runner or Runner()) if agent.is_hosted else None
    rewards = [_single(reward) for reward in spec.rewards]
    agent = agent.model_copy(update={"user": user, "tools": tools, "runner": runner})
    return job.with_spec(rewards=rewards, agent=agent)


def _single(service: Served) -> Served:
    """A spare worker would import the function a second time, which may take as long as torch."""
    changes: dict[str, Any] = {"slots": 1, "replicas": 1, "autoscaling": None}
    if service.function is not None:
        changes["function"] = service.function.model_copy(update={"spare_workers": 0})
    return service.model_copy(update=changes)


def _with_groups(job: RLJob) -> RLJob:
    """Return the job with rewards that get all samples of a prompt in one call."""
    rewards = [reward.model_copy(update={"scope": "group"}) for reward in job.spec.rewards]
    return job.with_spec(rewards=rewards)


def _without_served_models(job: RLJob) -> RLJob:
    """Return the job with an endpoint in place of each chat model that it serves. Their servers check templates at
    their start, and nothing asks the endpoint."""
    spec, agent = job.spec, job.spec.agent
    rewards = [
        reward.model_copy(update={"judge": _with_endpoint(reward.judge)}) if reward.judge else reward
        for reward in spec.rewards
    ]
    user = agent.user
    if user and user.model:
        user = user.model_copy(update={"model": _with_endpoint(user.model)})
    return job.with_spec(rewards=rewards, agent=agent.model_copy(update={"user": user}))


def _with_endpoint(chat: Chat) -> Chat:
    if chat.model is None:
        return chat
    endpoint = JudgeEndpoint(url="http://127.0.0.1:9", model=chat.model.source[:256])
    return chat.model_copy(update={"model": None, "endpoint": endpoint})


async def _try(
    job: RLJob,
    index: int,
    service: Service,
    prompt: Prompt,
    samples: SampleBuilder,
    cluster: LocalCluster,
    started: float,
    limit: float,
) -> Trial:
    settings, trial = service.settings, Trial(index, service.settings.name, 0.0, kind=service.kind)
    try:
        async with asyncio.timeout(limit):
            pod = await wait_until_ready(cluster, settings.name)
            trial = replace(trial, start_seconds=time.monotonic() - started)
            if isinstance(settings, Reward) and settings.judge is not None:
                return trial
            url = f"http://{pod['status']['podIP']}:{cluster.network.port(PORT_SERVICE)}"
            info = await read_info(url, TOKEN)
            if not isinstance(settings, Reward):
                return replace(trial, serves=_describe_forms(info))
            answers = build_samples(prompt, samples)
            if settings.scope == "sample" and not info["takes_groups"]:
                answers = answers[:1]
            (results,) = await score_all(url, TOKEN, job, settings, [answers])
        if settings.scope == "sample":
            return replace(trial, result=results[0], longer=results[1] if len(results) > 1 else None)
        return replace(trial, result=results[0], together=tuple(results))
    except TimeoutError:
        if settings.endpoint is not None:  # nothing is known to be wrong
            return trial
        what = "its call did not return" if trial.start_seconds else "its import did not end"
        where = find_import_place(cluster, settings.name)
        return replace(trial, error=f"{what} within {limit:g} s{where}; {_SKIP}")
    except UserError as error:
        return replace(trial, error=str(error))


def _describe_forms(info: Mapping[str, Any]) -> str:
    """Return the names of a server's tools, or the form of its user or program."""
    return ", ".join(tool["name"] for tool in info.get("tools", ())) or str(info["entrypoint"])


def build_samples(prompt: Prompt, samples: SampleBuilder) -> list[ScoreRequest]:
    """Return what the driver would send if the model's answers were the data's, and a longer text with it."""
    answer = _write_answer(prompt)
    completions = (answer, f"The answer is not hard to find.\n{answer}")
    return [samples.build(f"call-{number}", prompt, completion) for number, completion in enumerate(completions)]


def _write_answer(prompt: Prompt) -> str:
    """Return what a model would write that gives the answer of the data: text, or a number. Empty: that is unknown."""
    truth = prompt.ground_truth
    is_number = isinstance(truth, int | float) and not isinstance(truth, bool)
    return str(truth) if is_number or isinstance(truth, str) else ""


def find_problems(job: RLJob, trials: list[Trial]) -> Iterator[Finding]:
    """Report rewards without a result, and an `accuracy` of evaluations that nothing returns."""
    for trial in trials:
        service = job.spec.services[trial.index]
        path, result = service.source, trial.result
        # Its packages may be in its own image, which this machine does not run.
        only: Target | None = "local" if service.settings.image else None
        if trial.error:
            yield _locate(service, Finding(path, f"cannot be used: {trial.error}", only=only))
        elif result is not None and result.reason not in (None, InvalidReason.ABSTAINED):
            why = f"{result.reason}: {result.message}"
            message = f"is invalid for the first row, with the row's answer as the completion: {why}; {_SKIP}"
            yield _locate(service, Finding(path, message, only=only))
    yield from _find_missing_components(job, [trial for trial in trials if trial.kind == "reward"])


def _locate(service: Service, finding: Finding) -> Finding:
    """Return the finding at the line of the job's file, if it names a line of an inline function."""
    function, place = service.settings.function, _INLINE_PLACE.search(finding.message)
    if place is None or function is None or function.inline is None:
        return finding
    message = finding.message.replace(place[0], f"line {place[1]}: ", 1)
    return replace(finding, path=f"{service.path}.function.inline", message=message, line_within=int(place[1]))


def _find_missing_components(job: RLJob, scored: list[Trial]) -> Iterator[Finding]:
    """Report each `accuracy` that no reward returned, of `evaluation` or a set. An episode may return it, too."""
    are_known = len(scored) == len(job.spec.rewards) and all(each.result and each.result.valid for each in scored)
    if job.spec.agent.is_hosted or not are_known:
        return
    evaluation, by_set = job.spec.evaluation, {each.path: each.rewards for each in job.spec.held_out_sets}
    wanted = [("spec.evaluation", evaluation.accuracy, scored)]
    for index, each in enumerate(evaluation.sets):
        path = f"spec.evaluation.sets[{index}]"
        wanted.append((path, each.accuracy, [trial for trial in scored if trial.name in by_set[path]]))
    for path, accuracy, trials in wanted:
        names = sorted({"score", *_components(trials)})
        if accuracy and accuracy.rpartition("/")[2] not in names:
            message = f"must be a component that a reward returns, got {accuracy}; returned: {', '.join(names)}"
            yield Finding(f"{path}.accuracy", message)


def find_unrewarded_answer(job: RLJob, trials: list[Trial], prompt: Prompt) -> Iterator[Finding]:
    """Warn if the answer of the first row gets nothing. A reward that reads another column, or expects another form
    than the data have, would score every right answer so, without an error; one that returns nothing abstains."""
    rewards, answer = job.spec.rewards, _write_answer(prompt)
    results = [trial.result for trial in trials if trial.kind == "reward" and trial.result is not None]
    if job.spec.agent.is_hosted or not answer or not rewards or len(results) != len(rewards):
        return
    path = "spec.rewards[0]" if len(rewards) == 1 else "spec.rewards"
    shown = answer if len(answer) <= _MAX_SHOWN_CHARACTERS else f"{answer[:_MAX_SHOWN_CHARACTERS]}..."
    if all(result.reason == InvalidReason.ABSTAINED for result in results):
        message = (
            f"returns None for the answer of the first row, {shown!r}: it abstains, and a sample without any score "
            "trains nothing. Return a number, unless this row is not one that it scores"
        )
        yield Finding(path, message, is_warning=True)
        return
    scores = [result.score for result in results if result.score is not None]
    if len(scores) != len(rewards) or any(reward.scope != "sample" for reward in rewards):
        return  # of a group, the scores of two equal answers are relative to each other
    if sum(reward.weight * score for reward, score in zip(rewards, scores, strict=True)) <= 0:
        message = (
            f"gives nothing to the answer of the first row, {shown!r}: right answers may score 0. Check "
            "data.train.answer, the arguments of the function, and the form that it expects, with `rljob test-reward`"
        )
        yield Finding(path, message, is_warning=True)


def find_missed_groups(job: RLJob, trials: list[Trial]) -> Iterator[Finding]:
    """Warn of functions that compare the samples of a group, as lengths and ranks do, and get one sample a call."""
    for trial in trials:
        apart = _scores(filter(None, (trial.result, trial.longer)))
        together = _scores(trial.together)
        if len(apart) < 2 or len(together) < 2 or _are_close(apart, together):
            continue
        message = (
            f"scores the answer of the first row, and a longer text with it, {_show(apart)} one at a time and "
            f"{_show(together)} together: if it compares the samples of a prompt, set scope: group"
        )
        yield Finding(f"{job.spec.services[trial.index].path}.scope", message, is_warning=True)


def _scores(results: Iterable[ScoreResult]) -> list[float]:
    return [result.score for result in results if result.score is not None]


def _are_close(first: Iterable[float], second: Iterable[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(first, second, strict=True))


def _show(scores: Iterable[float]) -> str:
    return " and ".join(f"{score:.4g}" for score in scores)


def _components(trials: list[Trial]) -> Iterator[str]:
    for trial in trials:
        yield from trial.result.components if trial.result else ()
