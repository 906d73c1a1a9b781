"""One call of each function reward on one row of the data, in the server that training uses.

Finds what no static check can: an import that fails or hangs, a call that raises, the components. Other servers are
only started: of a judge, which checks its template, since a call would cost money or need vLLM; of a simulated user,
tools and a runner, whose calls need a conversation (`rljob test-agent`). Reward models and what needs packages to be
installed are left out. Invariant: when it returns, no process that it started is alive.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rljob_api.errors import UserError
from rljob_api.manifest.agent import Agent
from rljob_api.manifest.job import RLJob, Service, ServiceKind
from rljob_api.manifest.reward import Reward
from rljob_api.manifest.runner import Runner
from rljob_api.manifest.scorers import JudgeEndpoint, JudgeReward
from rljob_api.manifest.simulated_user import UserModel, UserModelService
from rljob_api.wire.contract import PORT_REWARD
from rljob_api.wire.protocol import InvalidReason, ScoreRequest, ScoreResult
from rljob_cli.check.jobfile import Finding, Target
from rljob_cli.check.one_turn import describe_one_turn
from rljob_cli.check.score_client import read_info, score_all
from rljob_cli.check.try_reward import TOKEN, find_ended_container, service_children
from rljob_cli.check.waits import find_import_place, pods_of, report_waits
from rljob_cli.local.cluster import LocalCluster
from rljob_cli.local.network import claim_block
from rljob_cli.manifests import is_ready
from rljob_inputs.prompts import Prompt

LIMIT_SECONDS = 60.0
"""For the import and the call of each reward."""
_POLL_SECONDS = 0.02
_STOP_SECONDS = 1.0
_SKIP = "skip this call with --no-call"

Chat = TypeVar("Chat", JudgeReward, UserModel)


@dataclass(frozen=True)
class Trial:
    """What one reward returned for one row, or what the server of a simulated user, tools or a runner serves."""

    index: int
    """In RLJobSpec.services, which begin with the rewards."""
    name: str
    start_seconds: float
    """Until the server was ready: the program's start and the function's import."""
    result: ScoreResult | None = None
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
    return [index for index, service in enumerate(job.spec.services) if _starts_quickly(service.reward)]


def describe_service(kind: ServiceKind, name: str) -> str:
    """`reward correct`, `simulated user`, `tool calculator`, `runner`."""
    return {"user": "simulated user", "runner": "runner"}.get(kind, f"{kind} {name}")


def _starts_quickly(reward: Reward) -> bool:
    if reward.judge is not None or isinstance(reward, UserModelService):
        return True
    function = reward.function
    return function is not None and not function.requirements and not function.config_map_key_ref


def call_rewards(
    job: RLJob, prompt: Prompt, say: Callable[[str], None], limit_seconds: float = LIMIT_SECONDS
) -> list[Trial]:
    """Call or start the services of `find_callable`, all at once. `say` gets a line about what is waited for."""
    chosen = find_callable(job)
    if not chosen:
        return []
    job = _without_served_models(job)
    with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
        network = claim_block(folder, None, ports=[PORT_REWARD])
        return asyncio.run(_call_all(job, chosen, prompt, LocalCluster(job, network, Path(folder)), say, limit_seconds))


async def _call_all(
    job: RLJob, chosen: list[int], prompt: Prompt, cluster: LocalCluster, say: Callable[[str], None], limit: float
) -> list[Trial]:
    async with cluster:
        try:
            services = {index: job.spec.services[index] for index in chosen}
            names = {each.reward.name: describe_service(each.kind, each.reward.name) for each in services.values()}
            for child in service_children(_with_one_worker(job), names):
                await cluster.store.apply(child)
            started = time.monotonic()
            progress = asyncio.create_task(report_waits(cluster, names, say, limit))
            try:
                calls = (_try(job, index, each, prompt, cluster, started, limit) for index, each in services.items())
                return list(await asyncio.gather(*calls))
            finally:
                progress.cancel()
        finally:
            await cluster.stop(_STOP_SECONDS)


def _with_one_worker(job: RLJob) -> RLJob:
    """Return the job with one Pod and one worker per service: a call needs no more."""
    single = {"slots": 1, "replicas": 1, "autoscaling": None}
    spec, agent = job.spec, job.spec.agent
    tools = [tool.model_copy(update=single) for tool in agent.tools]
    user = agent.user.model_copy(update=single) if agent.user else None
    runner = (agent.runner or Runner()).model_copy(update=single) if agent.is_hosted else None
    rewards = [reward.model_copy(update=single) for reward in spec.rewards]
    changes = {"rewards": rewards, "agent": agent.model_copy(update={"user": user, "tools": tools, "runner": runner})}
    return job.model_copy(update={"spec": spec.model_copy(update=changes)})


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
    changes = {"rewards": rewards, "agent": agent.model_copy(update={"user": user})}
    return job.model_copy(update={"spec": spec.model_copy(update=changes)})


def _with_endpoint(chat: Chat) -> Chat:
    if chat.model is None:
        return chat
    endpoint = JudgeEndpoint(url="http://127.0.0.1:9", model=chat.model.source[:256])
    return chat.model_copy(update={"model": None, "endpoint": endpoint})


async def _try(
    job: RLJob, index: int, service: Service, prompt: Prompt, cluster: LocalCluster, started: float, limit: float
) -> Trial:
    reward, trial = service.reward, Trial(index, service.reward.name, 0.0, kind=service.kind)
    try:
        async with asyncio.timeout(limit):
            pod = await _wait_until_ready(cluster, reward.name)
            trial = replace(trial, start_seconds=time.monotonic() - started)
            if reward.judge is not None:
                return trial
            url = f"http://{pod['status']['podIP']}:{PORT_REWARD}"
            if service.kind != "reward":
                return replace(trial, serves=await _read_forms(url))
            (results,) = await score_all(url, TOKEN, job, reward, [build_samples(reward, prompt, job.spec.agent)])
        return replace(trial, result=results[0])
    except TimeoutError:
        if reward.endpoint is not None:  # nothing is known to be wrong
            return trial
        what = "its call did not return" if trial.start_seconds else "its import did not end"
        where = find_import_place(cluster, reward.name)
        return replace(trial, error=f"{what} within {limit:g} s{where}; {_SKIP}")
    except UserError as error:
        return replace(trial, error=str(error))


async def _read_forms(url: str) -> str:
    """Return the names of a server's tools, or the form of its user or program."""
    info = await read_info(url, TOKEN)
    return ", ".join(tool["name"] for tool in info.get("tools", ())) or str(info["entrypoint"])


async def _wait_until_ready(cluster: LocalCluster, name: str) -> dict[str, Any]:
    while True:
        cluster.check()
        for pod in pods_of(cluster, name):
            if is_ready(pod):
                return pod
            if ended := find_ended_container(pod):
                raise UserError((ended["message"] or "its server ended").strip().removeprefix("error: "))
        await asyncio.sleep(_POLL_SECONDS)


def build_samples(reward: Reward, prompt: Prompt, agent: Agent) -> list[ScoreRequest]:
    """Return what the driver would send if the model's answer were the data's: one sample, or a group of two."""
    completion = prompt.ground_truth if isinstance(prompt.ground_truth, str) else ""
    count = 1 if reward.scope == "sample" else 2
    extra = {"index": prompt.index, "split": "train", **prompt.extra_info, "truncated": False, "num_tokens": 1}
    extra |= describe_one_turn(agent, prompt.prompt, completion)
    return [
        ScoreRequest(
            id=f"call-{number}",
            prompt=prompt.prompt,
            completion=completion,
            ground_truth=prompt.ground_truth,
            data_source=prompt.data_source,
            extra_info=extra,
            prompt_ids=[0],
            completion_ids=[0],
        )
        for number in range(count)
    ]


def find_problems(job: RLJob, trials: list[Trial]) -> Iterator[Finding]:
    """Report rewards without a result, and an `evaluation.accuracy` that nothing returns. An episode may return it."""
    for trial in trials:
        service = job.spec.services[trial.index]
        path, result = service.source, trial.result
        # Its packages may be in its own image, which this machine does not run.
        only: Target | None = "local" if service.reward.image else None
        if trial.error:
            yield Finding(path, f"cannot be used: {trial.error}", only=only)
        elif result is not None and result.reason not in (None, InvalidReason.ABSTAINED):
            why = f"{result.reason}: {result.message}"
            message = f"is invalid for the first row, with the row's answer as the completion: {why}; {_SKIP}"
            yield Finding(path, message, only=only)
    wanted, names = job.spec.evaluation.accuracy, sorted({"score", *_components(trials)})
    scored = [trial for trial in trials if trial.kind == "reward"]
    are_all_known = (
        not job.spec.agent.is_hosted
        and len(scored) == len(job.spec.rewards)
        and all(t.result and t.result.valid for t in scored)
    )
    if wanted and are_all_known and wanted.rpartition("/")[2] not in names:
        message = f"must be a component that a reward returns, got {wanted}; returned: {', '.join(names)}"
        yield Finding("spec.evaluation.accuracy", message)


def _components(trials: list[Trial]) -> Iterator[str]:
    for trial in trials:
        yield from trial.result.components if trial.result else ()
