"""Problems of a schema-valid spec that keep its children from being built, each with path and fix.

The types, the CRD and its rules (rljob_api) come first. These checks remain: what only a cluster requires, and
templates, which the schema leaves open.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, starmap
from urllib.parse import urlsplit

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Role
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.reward import Reward, RewardBase, RewardModel
from rljob_api.manifest.sources import find_argument_problem, parse_source
from rljob_core.backend import Manifest
from rljob_core.children import build_children
from rljob_core.children.common import REWARD, child_name
from rljob_core.children.config import build_job_config
from rljob_core.children.merge import merge
from rljob_core.children.service import build_server, find_services, service_of
from rljob_core.children.start_model import with_any_claim
from rljob_core.defaults import DEFAULTS
from rljob_core.pod_checks import find_pod_problems
from rljob_core.pod_checks.origin import RolePath

_MAX_CONFIG_BYTES = 1_000_000
"""The API server accepts ConfigMaps of up to 1 MiB."""


def find_problems(job: RLJob) -> list[str]:
    """All problems of the job; empty if its children can be built and a cluster of any size takes them."""
    if problems := find_spec_problems(job):
        return [*problems, *find_size_problems([build_job_config(job)])]
    try:
        children = build_children(with_any_claim(job), "", DEFAULTS)
    except UserError as error:
        return [str(error)]
    return find_child_problems(job, children)


def find_child_problems(job: RLJob, children: list[Manifest]) -> list[str]:
    """Problems of the built children that the API server would reject."""
    return [*find_size_problems(children), *find_pod_problems(children, find_role_paths(job))]


def find_role_paths(owner: RLJob | RewardModel) -> dict[str, RolePath]:
    """The role of each workload, by the workload's name."""
    if isinstance(owner, RewardModel):
        return {service_of(owner).name: RolePath("spec", owner.spec, REWARD)}
    roles = {
        child_name(owner, name): RolePath(f"spec.{name}", role, name) for name, role in owner.spec.own_roles.items()
    }
    return roles | {each.name: RolePath(each.path, each.settings, each.role) for each in find_services(owner)}


def find_model_problems(model: RewardModel) -> list[str]:
    """All problems of a RewardModel; empty if its children can be built and a cluster takes them."""
    problems = find_model_spec_problems(model)
    if problems or not model.spec.is_served:
        return problems
    return find_model_child_problems(model, build_server(service_of(model), "", DEFAULTS))


def find_model_spec_problems(model: RewardModel) -> list[str]:
    """Problems for which the children cannot be built."""
    problems = [*find_url_problems("spec", model.spec), *find_source_problems(find_model_sources("spec", model.spec))]
    if (served := model.spec.served_model) and (problem := find_argument_problem(served.chat_template_arguments)):
        problems.append(f"spec.{model.spec.served_model_field}.chatTemplateArguments {problem}")
    return problems + (list(find_template_problems("spec", model.spec)) if model.spec.is_served else [])


def find_model_child_problems(model: RewardModel, children: list[Manifest]) -> list[str]:
    """Problems of a RewardModel's built children that the API server would reject."""
    return list(find_pod_problems(children, find_role_paths(model)))


def find_spec_problems(job: RLJob) -> list[str]:
    """All problems except for sizes. Those need the built children (find_size_problems), a large part of the time of a
    reconcile."""
    services = [(service.path, service.settings) for service in job.spec.services]
    return [
        *find_source_problems(job.spec.sources),
        *_runner_problems(job),
        *_argument_problems(job),
        *chain.from_iterable(starmap(find_url_problems, services)),
        *_other_model_problems(job),
        *chain.from_iterable(starmap(find_template_problems, _roles(job, services))),
        *_placement_problems(job),
        *_scheduling_problems(job),
    ]


def _runner_problems(job: RLJob) -> Iterator[str]:
    runner = job.spec.agent.runner
    if runner and runner.working_dir is not None and not runner.working_dir.startswith("/"):
        yield (
            f"spec.agent.runner.workingDir must be an absolute path in the runner's image, got {runner.working_dir}; "
            "`rljob submit` takes a folder of this machine along, `rljob run` uses it"
        )


def _argument_problems(job: RLJob) -> Iterator[str]:
    """Problems of variables of chat templates, which the API server does not see."""
    found = {"spec.data": job.spec.data.chat_template_arguments}
    found |= {path: model.chat_template_arguments for path, model in job.spec.served_models.items()}
    for path, arguments in found.items():
        if problem := find_argument_problem(arguments):
            yield f"{path}.chatTemplateArguments {problem}"


def find_model_sources(path: str, reward: RewardBase) -> dict[str, str]:
    """Path and source of the checkpoint that a reward serves; empty if it serves none."""
    model = reward.served_model
    return {f"{path}.{reward.served_model_field}.source": model.source} if model else {}


def find_source_problems(sources: Mapping[str, str]) -> Iterator[str]:
    """Problems of sources (by path) that a cluster cannot resolve."""
    for path, source in sources.items():
        with contextlib.suppress(UserError):  # its own rule reports the scheme, with its line
            if parse_source(source).kind == "relative":
                yield (
                    f"{path} must be hf://org/name, pvc://claim/path, s3://bucket/path or an absolute path, "
                    f"got {source}; only `rljob run` takes relative ones"
                )


def find_url_problems(path: str, settings: RewardBase | CallService) -> Iterator[str]:
    http = settings.http if isinstance(settings, RewardBase) else None
    endpoint = http or settings.endpoint
    if endpoint is not None and not _is_url(endpoint.url):
        where = f"{path}.{'http' if http else f'{settings.kind}.endpoint'}.url"
        yield f"{where} must name a host, and a port from 1 to 65535 if any, got {endpoint.url}"


def _other_model_problems(job: RLJob) -> Iterator[str]:
    for index, model in enumerate(job.spec.agent.models):
        if not _is_url(model.url):
            where = f"spec.agent.models[{index}].url"
            yield f"{where} must name a host, and a port from 1 to 65535 if any, got {model.url}"


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def find_template_problems(path: str, role: Role) -> Iterator[str]:
    """Problems of the env and the template of the role at `path`, in a job or a RewardModel."""
    for name in role.env:
        if not name or "=" in name:  # no process takes it, on a cluster or here
            yield f"{path}.env.{name} must be an environment variable's name, without '='"
    unknown = set(role.template) - {"metadata", "spec"}
    if unknown:
        yield f"{path}.template may have metadata and spec, got {', '.join(sorted(unknown))}"
    try:
        merged = merge({"metadata": {}, "spec": {"containers": []}}, role.template, f"{path}.template")
    except UserError as error:
        yield str(error)
        return
    for part in ("metadata", "spec"):
        if part not in merged:
            yield f"{path}.template.{part} must not be null: it would delete what the operator builds; remove it"
    if "containers" not in merged.get("spec", {"containers": []}):
        yield f"{path}.template.spec.containers must not be null: it would delete what the operator builds; remove it"


def _roles(job: RLJob, services: list[tuple[str, Reward | CallService]]) -> Iterator[tuple[str, Role]]:
    """Every role with Pods that the operator creates, with its path in the manifest."""
    yield from ((f"spec.{name}", role) for name, role in job.spec.own_roles.items())
    yield from ((path, settings) for path, settings in services if settings.is_served)


def _placement_problems(job: RLJob) -> Iterator[str]:
    """The other fields of Pods that do not exist are rules of the type. The API server does not see templates."""
    if job.spec.shares_trainer and job.spec.rollout.template:
        yield (
            "spec.rollout.template must be left out with rollout.placement trainer: the rollouts run in the trainer's "
            "Pods; set spec.trainer.template, or remove spec.rollout.placement"
        )


def _scheduling_problems(job: RLJob) -> Iterator[str]:
    scheduling = job.spec.scheduling
    if scheduling.gang == "kueue" and not scheduling.queue:
        yield "spec.scheduling.queue must be set for gang: kueue; name a LocalQueue of the job's namespace"
    if scheduling.queue and scheduling.gang != "kueue":
        yield f"spec.scheduling.queue has no meaning for gang: {scheduling.gang}; remove it, or use kueue"


def find_size_problems(children: Iterable[Manifest]) -> Iterator[str]:
    """Problems of ConfigMaps that the API server would reject."""
    for child in children:
        num_bytes = sum(len(text.encode()) for text in child["data"].values()) if child["kind"] == "ConfigMap" else 0
        if num_bytes > _MAX_CONFIG_BYTES:
            yield (
                f"spec takes {num_bytes} bytes as a ConfigMap, at most {_MAX_CONFIG_BYTES} are allowed; move inline "
                "functions to your own ConfigMap (function.configMapKeyRef)"
            )
