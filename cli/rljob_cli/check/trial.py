"""Calls of each function reward on one row of the data, in the server that training uses.

Finds a form that is unknown, an import that fails or hangs, a call that raises, the components, and whether right
answers get another score than an empty and a wrong one. Other servers are
only started: of a judge, which checks its template, since a call would cost money or need vLLM; of a simulated user,
tools and a runner, whose calls need a conversation (`rljob test-agent`). Reward models and what needs packages to be
installed are left out. Invariant: when it returns, no process that it started is alive.
"""

import asyncio
import contextlib
import itertools
import json
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
from rljob_api.wire.contract import ENV_INSTALLED_ONLY, FILE_FUNCTION, NOT_INSTALLED
from rljob_api.wire.scores import ScoreRequest, ScoreResult
from rljob_cli.check.jobfile import Finding, Target
from rljob_cli.check.samples import SampleBuilder, load_job_tokenizer
from rljob_cli.check.score_client import GUESSED, describe_guess, read_info, score_all
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
_FORMS = (
    *("12", "#### 12", "\\boxed{12}", "Answer: 12", "<answer>12</answer>"),
    "<think>It is 12.</think>\n<answer>12</answer>",
)
"""In which rewards expect an answer, such as 12."""
_WRONG = ("", "I do not know.")
_MAX_SECONDS = 10.0
"""For the calls after the first one, all together."""
_OTHER_VERSIONS: Mapping[str, Mapping[str, Any]] = {
    "verl": {"signature": GUESSED},
    GUESSED: {"signature": "verl"},
    "trl": {"signature": "trl", "columns": {"completions": "completion"}},
}
"""By signature: fields of the function with which it gets what another version of the project passes."""

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
    """The result for the row's answer, in the form that scores most."""
    form: str = ""
    """That form. Empty: the answer alone."""
    scores: tuple[float, ...] = ()
    """Those for the answer in all forms, and for the wrong ones. Empty: they were not tried."""
    apart: tuple[ScoreResult, ...] = ()
    """The results of the answer and of a longer one, scored alone. Only of functions that also score groups."""
    together: tuple[ScoreResult, ...] = ()
    """The results of both, scored as one group."""
    remedy: str = ""
    """Fields of the function with which right answers get another score than wrong ones."""
    signature: str = ""
    guess: str = ""
    """How to set another form than the guessed one."""
    error: str = ""
    """Why there is no result."""
    kind: ServiceKind = "reward"
    serves: str = ""
    """The form of the user or the program, or the names of the tools. Empty for a reward."""

    @property
    def compares(self) -> bool:
        """Whether it scores the samples of a group otherwise than one at a time."""
        apart, together = _scores(self.apart), _scores(self.together)
        pairs = zip(apart, together, strict=False)
        are_close = all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in pairs)
        return len(apart) == len(together) == 2 and not are_close

    @property
    def raises(self) -> bool:
        return self.result is not None and self.result.reason is InvalidReason.EXCEPTION

    @property
    def is_blind(self) -> bool:
        """Whether right answers get the same score as others."""
        return len(self.scores) > 1 and len({*self.scores}) == 1 and not self.compares

    def describe(self) -> str:
        """`reward correct: score 1 (acc 1), ready after 0.8 s`, `tool math: add, multiply, ready after 0.8 s`."""
        if self.kind != "reward" and not self.serves:
            return f"{describe_service(self.kind, self.name)}: not checked, its server took too long to start"
        if self.kind != "reward":
            return f"{describe_service(self.kind, self.name)}: {self.serves}, ready after {self.start_seconds:.1f} s"
        guess = f"; {self.guess}" if self.guess else ""
        if self.result is None:
            what = (
                "loaded, but not called, since no row was read"
                if self.signature
                else "started; its model was not asked"
            )
            return f"reward {self.name}: {what}{guess}"
        if self.result.score is None:
            return f"reward {self.name}: no score"
        components = ", ".join(f"{name} {value:.4g}" for name, value in self.result.components.items())
        shown = f" ({components})" if components else ""
        if self.form:
            shown = f" for `{self.form}`{shown}".replace("\n", " ")
        elif self.is_blind:
            shown = f" for right, wrong and empty answers alike{shown}"
        return (
            f"reward {self.name}: score {self.result.score:.4g}{shown}, ready after {self.start_seconds:.1f} s{guess}"
        )


def find_callable(job: RLJob) -> list[int]:
    """Return the services whose servers start in a second: functions, unless their packages are not installed yet, and
    judges and model users, whose model is not asked."""
    return [index for index, service in enumerate(job.spec.services) if _starts_quickly(service.settings)]


def describe_skipped(job: RLJob, trials: Iterable[Trial] = ()) -> list[str]:
    """Return a line for each function that was not called, with the reason."""
    lines, called = [], {trial.index for trial in trials}
    for index, service in enumerate(job.spec.services):
        function, name = service.settings.function, describe_service(service.kind, service.settings.name)
        if function is None or index in called:
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
    return function is not None and not function.config_map_key_ref


def call_rewards(
    job: RLJob, prompt: Prompt | None, say: Callable[[str], None], limit_seconds: float = LIMIT_SECONDS
) -> list[Trial]:
    """Call or start the services of `find_callable`, all at once. Without a prompt, functions are only loaded. `say`
    gets a line about what is waited for."""
    chosen = find_callable(job)
    job, again = _without_served_models(job), partial(_call_chosen, prompt=prompt, say=say, limit=limit_seconds)
    trials = again(job, chosen)
    grouped = {trial.index: {"scope": "group"} for trial in trials if len(trial.apart) > 1}
    together = {trial.index: trial.together for trial in again(_change(job, grouped), [*grouped])}
    trials = [replace(trial, together=together.get(trial.index, ())) for trial in trials]
    doubted = [trial for trial in trials if trial.signature in _OTHER_VERSIONS and (trial.is_blind or trial.raises)]
    others = {
        trial.index: {"function": function.model_copy(update=_OTHER_VERSIONS[trial.signature])}
        for trial in doubted
        if (function := job.spec.rewards[trial.index].function)
        and function.signature == "auto"
        and not function.columns
    }
    found = again(_change(job, others), [*others])
    raised = {trial.index for trial in doubted if trial.raises}
    better = {each.index for each in found if len({*each.scores}) > 1 or (each.scores and each.index in raised)}
    written = {name: json.dumps(fields)[1:-1].replace('"', "") for name, fields in _OTHER_VERSIONS.items()}
    return [replace(each, remedy=written[each.signature]) if each.index in better else each for each in trials]


def _call_chosen(
    job: RLJob, chosen: list[int], prompt: Prompt | None, say: Callable[[str], None], limit: float
) -> list[Trial]:
    if not chosen:
        return []
    with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
        cluster = LocalCluster(job, claim_block(folder), Path(folder), env={ENV_INSTALLED_ONLY: "1"})
        return asyncio.run(_call_all(job, chosen, prompt, cluster, say, limit))


async def _call_all(
    job: RLJob,
    chosen: list[int],
    prompt: Prompt | None,
    cluster: LocalCluster,
    say: Callable[[str], None],
    limit: float,
) -> list[Trial]:
    services = {index: job.spec.services[index] for index in chosen}
    names = {each.settings.name: describe_service(each.kind, each.settings.name) for each in services.values()}
    children, progress = service_children(_with_one_worker(job), names), report_waits(cluster, names, say, limit)
    async with running(cluster, children, _STOP_SECONDS, progress, signals=()):
        samples = SampleBuilder(job, await asyncio.to_thread(load_job_tokenizer, job))
        call = partial(_try, prompt=prompt, samples=samples, cluster=cluster, started=time.monotonic(), limit=limit)
        found = await asyncio.gather(*(call(job, index, each) for index, each in services.items()))
        return [trial for trial in found if NOT_INSTALLED not in trial.error]


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


def _change(job: RLJob, changes: Mapping[int, Mapping[str, Any]]) -> RLJob:
    """Return the job with other fields of some rewards, by index."""
    rewards = [reward.model_copy(update=changes.get(index, {})) for index, reward in enumerate(job.spec.rewards)]
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
    prompt: Prompt | None,
    samples: SampleBuilder,
    cluster: LocalCluster,
    started: float,
    limit: float,
) -> Trial:
    settings, trial = service.settings, Trial(index, service.settings.name, 0.0, kind=service.kind)
    try:
        async with asyncio.timeout(limit):
            url = await wait_until_ready(cluster, settings.name)
            trial = replace(trial, start_seconds=time.monotonic() - started)
            if isinstance(settings, Reward) and settings.judge is not None:
                return trial
            info = await read_info(url, TOKEN)
            if not isinstance(settings, Reward):
                tools = ", ".join(tool["name"] for tool in info.get("tools", ()))
                return replace(trial, serves=tools or str(info["entrypoint"]))
            trial = replace(trial, signature=info["signature"], guess=describe_guess(settings, info))
            if prompt is None:
                return trial
            pair, texts = build_samples(prompt, samples)
            if settings.scope == "sample":
                pair = pair if info["takes_groups"] else pair[:1]
            else:  # as many as the function gets
                numbered = zip(range(job.spec.algorithm.group_size), itertools.cycle(pair), strict=False)
                pair = [each.model_copy(update={"id": f"call-{number}"}) for number, each in numbered]
            score = partial(score_all, url, TOKEN, job, settings)
            (results,) = await score([pair])
            trial = replace(trial, result=results[0])
            if settings.scope != "sample":
                return replace(trial, together=tuple(results[:2]))
            trial = replace(trial, apart=tuple(results))
            with contextlib.suppress(TimeoutError):
                # A function with network may pay for each call.
                if texts and results[0].valid and settings.function and not settings.function.network:
                    async with asyncio.timeout(_MAX_SECONDS):
                        found = [each for (each,) in await score([[request] for request in texts.values()])]
                    valid = [(each, form) for each, form in zip(found, texts, strict=True) if each.valid]
                    best, form = max(valid, key=lambda pair: pair[0].score or 0.0, default=(results[0], ""))
                    scores = (results[0].score or 0.0, *_scores(found))
                    if (best.score or 0.0) > scores[0]:
                        trial = replace(trial, result=best, form=form)
                    trial = replace(trial, scores=scores)
            return trial
    except TimeoutError:
        if settings.endpoint is not None:  # nothing is known to be wrong
            return trial
        if settings.function and settings.function.requirements and not trial.start_seconds:  # such as vLLM
            return replace(trial, error=NOT_INSTALLED)
        what = "its call did not return" if trial.start_seconds else "its import did not end"
        where = find_import_place(cluster, settings.name)
        return replace(trial, error=f"{what} within {limit:g} s{where}; {_SKIP}")
    except UserError as error:
        return replace(trial, error=str(error))


def build_samples(prompt: Prompt, samples: SampleBuilder) -> tuple[list[ScoreRequest], dict[str, ScoreRequest]]:
    """Return what the driver would send if the model's answers were the data's, and a longer text with it; and for the
    answer in other forms, and wrong ones. None of these if the answer is unknown."""
    texts = write_answers(prompt.ground_truth)
    answer = texts.pop(_FORMS[0], "")
    pair = (answer, f"The answer is not hard to find.\n{answer}")
    built = [samples.build(f"call-{number}", prompt, text) for number, text in enumerate([*pair, *texts.values()])]
    return built[:2], dict(zip(texts, built[2:], strict=True))


def write_answers(truth: Any) -> dict[str, str]:
    """Return the answer of the data as models write it, by form, and wrong ones. Of an object, its first value, and all
    of it as JSON. Empty: it is unknown."""
    leaf = truth
    while isinstance(leaf, dict | list) and leaf:
        leaf = next(iter(leaf.values() if isinstance(leaf, dict) else leaf))
    if isinstance(leaf, bool) or not isinstance(leaf, str | int | float) or leaf == "":
        return {}
    final = str(leaf).rpartition("####")[2].strip()  # gsm8k's own answers end with it
    texts = {form: form.replace("12", final) for form in _FORMS} | {_FORMS[0]: str(leaf)}
    whole = {} if leaf is truth else {"JSON": json.dumps(truth, ensure_ascii=False)}
    return texts | whole | dict(zip(_WRONG, _WRONG, strict=True))


def find_problems(job: RLJob, trials: list[Trial]) -> Iterator[Finding]:
    """Report rewards without a result, and an `accuracy` of evaluations that nothing returns."""
    for trial in trials:
        service = job.spec.services[trial.index]
        path, result = service.source, trial.result
        # Its packages may be in its own image, which this machine does not run.
        only: Target | None = "local" if service.settings.image else None
        if trial.error:
            if path.endswith(".function") and "function.requirements (" in trial.error:
                path, only = f"{path}.requirements", "local"  # a cluster may have another index
            yield _locate(service, Finding(path, f"cannot be used: {trial.error}", only=only))
        elif result is not None and result.reason not in (None, InvalidReason.ABSTAINED):
            why = f"{result.reason}: {result.message}"
            remedy = f"it scores with function.{trial.remedy}, so set that" if trial.remedy else _SKIP
            message = f"is invalid for the first row, with the row's answer as the completion: {why}; {remedy}"
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
    """Warn if no reward tells right answers from others, and of each that does with other texts. A reward that reads
    another column, or expects another form or other texts than it gets, would score every right answer so, without an
    error; one that returns nothing abstains."""
    rewards, found = job.spec.rewards, [each for each in trials if each.kind == "reward" and each.result is not None]
    answer = write_answers(prompt.ground_truth).get(_FORMS[0], "")
    if job.spec.agent.is_hosted or not answer or not found:
        return
    are_all = len(found) == len(rewards)
    shown = answer if len(answer) <= _MAX_SHOWN_CHARACTERS else f"{answer[:_MAX_SHOWN_CHARACTERS]}..."
    if are_all and all(trial.result and trial.result.reason == InvalidReason.ABSTAINED for trial in found):
        message = (
            f"returns None for the answer of the first row, {shown!r}: it abstains, and a sample without any score "
            "trains nothing. Return a number, unless this row is not one that it scores"
        )
        yield Finding("spec.rewards[0]" if len(rewards) == 1 else "spec.rewards", message, is_warning=True)
    are_blind = are_all and all(trial.is_blind for trial in found)
    for trial in found:
        what = f"scores the first row's answer, {shown!r}, in every usual form as no answer and a wrong one"
        remedy = (
            f"right answers score otherwise with function.{trial.remedy}, so set that"
            if trial.remedy
            else "it may need another answer (data.train.answer), entry point, group (scope) or other texts "
            "(function.columns: {PARAMETER: conversation}); try it with `rljob test-reward`"
        )
        if trial.is_blind and (trial.remedy or are_blind):
            yield Finding(f"{job.spec.services[trial.index].path}.function", f"{what}: {remedy}", is_warning=True)


def find_missed_groups(job: RLJob, trials: list[Trial]) -> Iterator[Finding]:
    """Warn of functions that compare the samples of a group, as lengths and ranks do, and get one sample a call."""
    for trial in filter(lambda trial: trial.compares, trials):
        message = (
            f"scores the answer of the first row, and a longer text with it, {_show(_scores(trial.apart))} one at a "
            f"time and {_show(_scores(trial.together))} together: if it compares the samples of a prompt, set scope: "
            "group"
        )
        yield Finding(f"{job.spec.services[trial.index].path}.scope", message, is_warning=True)


def _scores(results: Iterable[ScoreResult]) -> list[float]:
    return [result.score for result in results if result.score is not None]


def _show(scores: Iterable[float]) -> str:
    return " and ".join(f"{score:.4g}" for score in scores)


def _components(trials: list[Trial]) -> Iterator[str]:
    for trial in trials:
        yield from trial.result.components if trial.result else ()
