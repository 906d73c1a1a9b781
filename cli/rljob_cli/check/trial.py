"""One call of each function reward on one row of the data, in the server that training uses.

Finds what no static check can: an import that fails or hangs, a call that raises, the components. The server of a judge
with an endpoint is only started, which checks its template: a call would cost money. Rewards that need vLLM or packages
to be installed are left out. Invariant: when it returns, no process that it started is alive.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward
from rljob_api.wire.contract import PORT_REWARD
from rljob_api.wire.protocol import InvalidReason, ScoreRequest, ScoreResult
from rljob_cli.check.jobfile import Finding, Target
from rljob_cli.check.score_client import score_all
from rljob_cli.check.try_reward import TOKEN, find_ended_container, reward_children
from rljob_cli.check.waits import find_import_place, pods_of, report_waits
from rljob_cli.local.cluster import LocalCluster
from rljob_cli.local.network import claim_block
from rljob_cli.manifests import is_ready
from rljob_inputs.prompts import Prompt

LIMIT_SECONDS = 60.0
"""For the import and the call of each reward."""
_JUDGE_SECONDS = 30.0
_POLL_SECONDS = 0.02
_STOP_SECONDS = 1.0
_SKIP = "skip this call with --no-call"


@dataclass(frozen=True)
class Trial:
    """What one reward returned for one row."""

    index: int
    """Of the reward in the job."""
    name: str
    start_seconds: float
    """Until the server was ready: the program's start and the function's import."""
    result: ScoreResult | None = None
    error: str = ""
    """Why there is no result."""

    def describe(self) -> str:
        """`reward correct: score 1 (acc 1), ready after 0.8 s`."""
        if self.result is None:
            return f"reward {self.name}: started; its endpoint was not asked"
        if self.result.score is None:
            return f"reward {self.name}: no score"
        components = ", ".join(f"{name} {value:.4g}" for name, value in self.result.components.items())
        shown = f" ({components})" if components else ""
        return f"reward {self.name}: score {self.result.score:.4g}{shown}, ready after {self.start_seconds:.1f} s"


def find_callable(job: RLJob) -> list[int]:
    """Return the rewards whose servers start in a second: functions without packages to install, and judges with an
    endpoint."""
    return [index for index, reward in enumerate(job.spec.rewards) if _starts_quickly(reward)]


def _starts_quickly(reward: Reward) -> bool:
    if reward.judge is not None:
        return reward.judge.endpoint is not None
    function = reward.function
    return function is not None and not function.requirements and not function.config_map_key_ref


def call_rewards(
    job: RLJob, prompt: Prompt, say: Callable[[str], None], limit_seconds: float = LIMIT_SECONDS
) -> list[Trial]:
    """Call the rewards of `find_callable`, all at once. `say` gets a line about what is waited for."""
    chosen = find_callable(job)
    if not chosen:
        return []
    with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
        network = claim_block(folder, None, ports=[PORT_REWARD])
        return asyncio.run(_call_all(job, chosen, prompt, LocalCluster(job, network, Path(folder)), say, limit_seconds))


async def _call_all(
    job: RLJob, chosen: list[int], prompt: Prompt, cluster: LocalCluster, say: Callable[[str], None], limit: float
) -> list[Trial]:
    async with cluster:
        try:
            children = {(c["kind"], c["metadata"]["name"]): c for index in chosen for c in _children(job, index)}
            for child in children.values():
                await cluster.store.apply(child)
            started, names = time.monotonic(), [job.spec.rewards[index].name for index in chosen]
            progress = asyncio.create_task(report_waits(cluster, names, say, limit))
            try:
                calls = (_call(job, index, prompt, cluster, started, limit) for index in chosen)
                return list(await asyncio.gather(*calls))
            finally:
                progress.cancel()
        finally:
            await cluster.stop(_STOP_SECONDS)


def _children(job: RLJob, index: int) -> list[dict[str, Any]]:
    """Return the objects of one reward with one worker: a call needs no more."""
    rewards = list(job.spec.rewards)
    rewards[index] = rewards[index].model_copy(update={"slots": 1, "autoscaling": None})
    single = job.model_copy(update={"spec": job.spec.model_copy(update={"rewards": rewards})})
    return reward_children(single, rewards[index])


async def _call(job: RLJob, index: int, prompt: Prompt, cluster: LocalCluster, started: float, limit: float) -> Trial:
    reward, ready_seconds = job.spec.rewards[index], 0.0
    try:
        async with asyncio.timeout(limit if reward.judge is None else min(limit, _JUDGE_SECONDS)):
            pod = await _wait_until_ready(cluster, reward.name)
            ready_seconds = time.monotonic() - started
            if reward.judge is not None:
                return Trial(index, reward.name, ready_seconds)
            url = f"http://{pod['status']['podIP']}:{PORT_REWARD}"
            (results,) = await score_all(url, TOKEN, job, reward, [build_samples(reward, prompt)])
        return Trial(index, reward.name, ready_seconds, results[0])
    except TimeoutError:
        if reward.judge is not None:  # nothing is known to be wrong
            return Trial(index, reward.name, ready_seconds)
        what = "its call did not return" if ready_seconds else "its import did not end"
        where = find_import_place(cluster, reward.name)
        return Trial(index, reward.name, ready_seconds, error=f"{what} within {limit:g} s{where}; {_SKIP}")
    except UserError as error:
        return Trial(index, reward.name, ready_seconds, error=str(error))


async def _wait_until_ready(cluster: LocalCluster, name: str) -> dict[str, Any]:
    while True:
        cluster.check()
        for pod in pods_of(cluster, name):
            if is_ready(pod):
                return pod
            if ended := find_ended_container(pod):
                raise UserError((ended["message"] or "its server ended").strip().removeprefix("error: "))
        await asyncio.sleep(_POLL_SECONDS)


def build_samples(reward: Reward, prompt: Prompt) -> list[ScoreRequest]:
    """Return what the driver would send if the model's answer were the data's: one sample, or a group of two."""
    completion = prompt.ground_truth if isinstance(prompt.ground_truth, str) else ""
    count = 1 if reward.scope == "sample" else 2
    extra = {"index": prompt.index, "split": "train", **prompt.extra_info, "truncated": False, "num_tokens": 1}
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
    """Report rewards without a result, and an `evaluation.accuracy` that no reward returned."""
    for trial in trials:
        kind = "judge" if job.spec.rewards[trial.index].judge else "function"
        path, result = f"spec.rewards[{trial.index}].{kind}", trial.result
        # Its packages may be in its own image, which this machine does not run.
        only: Target | None = "local" if job.spec.rewards[trial.index].image else None
        if trial.error:
            yield Finding(path, f"cannot be used: {trial.error}", only=only)
        elif result is not None and result.reason not in (None, InvalidReason.ABSTAINED):
            why = f"{result.reason}: {result.message}"
            message = f"is invalid for the first row, with the row's answer as the completion: {why}; {_SKIP}"
            yield Finding(path, message, only=only)
    wanted, names = job.spec.evaluation.accuracy, sorted({"score", *_components(trials)})
    are_all_known = len(trials) == len(job.spec.rewards) and all(t.result and t.result.valid for t in trials)
    if wanted and are_all_known and wanted.rpartition("/")[2] not in names:
        message = f"must be a component that a reward returns, got {wanted}; returned: {', '.join(names)}"
        yield Finding("spec.evaluation.accuracy", message)


def _components(trials: list[Trial]) -> Iterator[str]:
    for trial in trials:
        yield from trial.result.components if trial.result else ()
