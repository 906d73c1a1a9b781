"""The servers: a Deployment and a headless Service per reward, simulated user, tool and runner of a job, and per
RewardModel.

They run user code, so they get the least: no job file, no service-account token (except to claim sandboxes), a
read-only root, and scratch space that is deleted with the Pod. An http reward has no children. Invariant: the children
of a job's reward and of a RewardModel differ only in names, labels and token; those of a reward and of an agent also in
`--serves`.
"""

from dataclasses import dataclass
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_sections import HangDetection
from rljob_api.manifest.pod_engines import find_ports
from rljob_api.manifest.pod_settings import POD_SETTINGS
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.models import EndpointLimits
from rljob_api.manifest.services.reward import Reward, RewardModel
from rljob_api.manifest.services.sandbox import Sandbox
from rljob_api.manifest.sources import Hub, ObjectStorage
from rljob_api.wire import contract
from rljob_core.backend import Manifest, Owner
from rljob_core.children import pods, reward_refs, vllm_sidecar
from rljob_core.children.common import (
    REWARD,
    TRAINER,
    build_selector,
    child_name,
    digest,
    role_of_service,
    service_name,
)
from rljob_core.children.configuration import read_settings
from rljob_core.children.env import build_env, build_source_env, build_token_env, build_tracing_env, read_tracing
from rljob_core.children.pods import build_probes
from rljob_core.children.volumes import Volume
from rljob_core.defaults import Defaults

_STARTUP_SECONDS = 300
"""Time to install requirements and to start, besides the import of a function."""
_MAX_EPISODE_DRAIN_SECONDS = 120
"""How long a replaced runner Pod, or one on a drained node, lets its episodes end. Most do; a long one is repeated on
another Pod, which takes none of its retries. The notice of spot nodes is 120 s at most, and an upgrade of nodes must
not wait half an hour for one episode."""
_DRAIN_SECONDS = 10
"""Time to send the responses after the last execution has ended."""
_PRE_STOP_SECONDS = 5
"""The driver may still send requests for this long after a terminating server has left the Service."""
_MAX_SURGE = "25%"
"""Rounded up, so at least one Pod."""
_DISK = "ephemeral-storage"
_READ_BY_DRIVER = {"weight", "failurePolicy", "deadlineSeconds", "hedging", "retries"}
_SERVES = {
    "reward": (),
    "user": ("--serves", "user"),
    "tool": ("--serves", "tools"),
    "runner": ("--serves", "episodes"),
}
"""Arguments of the server by the kind of service. That of a reward never changes: a changed command restarts Pods."""
_NAME_IN_SERVER = "rewardmodel"
"""RewardModel names may exceed the 15 characters of a reward's name. Pod labels distinguish models."""


@dataclass(frozen=True)
class HostedService:
    """One reward, simulated user, tool or runner that the operator serves."""

    owner: Owner
    settings: Reward | CallService
    """What its server reads."""
    path: str
    """Its path in the owner's manifest."""
    name: str
    """The name of all its children."""
    selector: dict[str, str]
    token_secret: str
    role: str = REWARD
    """Also the name of the server's container."""
    arguments: tuple[str, ...] = ()
    """Arguments of the server, besides those of every one."""
    framework: str = ""
    """The project whose environment a runner plays. Empty: a program's."""
    calls_policy: bool = False
    """Whether its Pods call the policy, through the head's gateway."""
    sandbox: Sandbox | None = None
    """The sandbox of a tool that claims it from agent-sandbox."""
    engine_ports: tuple[int, ...] = ()
    """Ports of its model's vLLM in each trainer Pod; empty if its model has a sidecar, or if it has none."""

    @property
    def has_sidecar(self) -> bool:
        return self.settings.served_model is not None and not self.engine_ports

    @property
    def sandbox_secret(self) -> str:
        """The Secret of such a tool and of its sandboxes."""
        return f"{self.name}-sandbox"


def find_services(job: RLJob) -> list[HostedService]:
    sandboxes = {tool.name: tool.sandbox for tool in job.spec.agent.tools}
    return [
        HostedService(
            owner=job,
            settings=service.settings,
            path=service.path,
            name=service_name(job, service),
            selector=build_selector(job, role_of_service(service), service.settings.name),
            token_secret=child_name(job, "token"),
            role=role_of_service(service),
            arguments=_SERVES[service.kind] + (("--framework", service.framework) if service.framework else ()),
            framework=service.framework,
            calls_policy=service.kind == "runner",
            sandbox=_with_pods(sandboxes.get(service.settings.name)) if service.kind == "tool" else None,
            engine_ports=tuple(find_ports(job.spec, f"{service.path}.{service.settings.served_model_field}")),
        )
        for service in job.spec.services
        if service.settings.is_served
    ]


def _with_pods(sandbox: Sandbox | None) -> Sandbox | None:
    return sandbox if sandbox and sandbox.provider == "agentSandbox" else None


def build_model_selector(name: str) -> dict[str, str]:
    return {contract.LABEL_REWARD_MODEL: name, contract.LABEL_ROLE: REWARD}


def service_of(model: RewardModel) -> HostedService:
    name = reward_refs.child_name(model.metadata.name)
    settings = model.spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=set(POD_SETTINGS))
    return HostedService(
        owner=model,
        settings=Reward.model_validate({**settings, "name": _NAME_IN_SERVER}),
        path="spec",
        name=name,
        selector=build_model_selector(model.metadata.name),
        token_secret=name,
    )


def hub_of(owner: Owner) -> Hub:
    """The Hub that the owner configures; a RewardModel uses its env."""
    return owner.spec.hub if isinstance(owner, RLJob) else Hub()


def storage_of(owner: Owner) -> ObjectStorage:
    """The object storage that the owner configures; a RewardModel uses its env."""
    return owner.spec.object_storage if isinstance(owner, RLJob) else ObjectStorage()


def _find_hang_detection(service: HostedService) -> Manifest:
    """What the service's sidecar reads of the job; empty: there is none, or it has the defaults, as a RewardModel's."""
    own: HangDetection = getattr(service.owner.spec, "hang_detection", HangDetection())
    return own.to_manifest() if service.has_sidecar and own != HangDetection() else {}


def build_server(service: HostedService, token: str, defaults: Defaults) -> list[Manifest]:
    """Service and Deployment. Raises UserError for a template that cannot be merged."""
    strategy = {"type": "RollingUpdate", "rollingUpdate": _build_update_strategy(service.owner)}
    spec = {"replicas": service.settings.replicas, "strategy": strategy}
    parts = _build_parts(service, token, defaults)
    children = pods.build_workload(service.owner, "Deployment", service.name, parts, spec)
    _add_images_env(children[1]["spec"]["template"], service.role)
    return children


def _build_update_strategy(owner: Owner) -> Manifest:
    """No capacity is lost: an old Pod is deleted when a new one is ready. Kueue fixes the number of Pods in a group and
    would delete the surplus one."""
    if isinstance(owner, RLJob) and owner.spec.scheduling.gang == "kueue":
        return {"maxSurge": 0, "maxUnavailable": 1}
    return {"maxSurge": _MAX_SURGE, "maxUnavailable": 0}


def _add_images_env(template: Manifest, role: str) -> None:
    """Pass the images to the server, which makes them part of its version: its own and that of the model, not those of
    containers that a template adds. They come from the merged template: the user may have changed or removed them. The
    API server rejects a container without an image."""
    spec, names = template["spec"], (role, pods.VLLM_CONTAINER)
    scoring = [c for c in [*spec.get("initContainers", []), *spec["containers"]] if c["name"] in names]
    server = next(container for container in scoring if container["name"] == role)
    images = " ".join(container.get("image") or "" for container in scoring)
    server["env"] = (server.get("env") or []) + build_env({contract.ENV_REWARD_IMAGES: images})


def _build_parts(service: HostedService, token: str, defaults: Defaults) -> pods.PodParts:
    settings, hangs = service.settings, _find_hang_detection(service)
    disk: Manifest = {"sizeLimit": settings.resources.limits.get(_DISK) or defaults.reward_scratch_size}
    sources = build_source_env(hub_of(service.owner), storage_of(service.owner))
    vllm_env = vllm_sidecar.SERVER_ENV if service.has_sidecar else {}
    if service.engine_ports:  # the trainer's Pod has its model
        assert isinstance(service.owner, RLJob)
        host = child_name(service.owner, TRAINER)
        vllm_env = {contract.ENV_VLLM_ENGINES: " ".join(f"{host}:{port}" for port in service.engine_ports)}
    return pods.PodParts(
        role=service.role,
        spec=settings,
        spec_path=service.path,
        image=defaults.find_reward_image(settings.python),
        defaults=defaults,
        command=[
            *("python", "-m", "rljob_service", "--config", f"{contract.PATH_CONFIG}/{contract.FILE_SERVICE}"),
            *("--grace", str(_find_grace_seconds(service))),
            *service.arguments,
        ],
        labels=service.selector,
        config=_read_by_server(service)
        | {"token": digest(token), **({"hangDetection": hangs} if hangs else {})}
        | read_tracing(service.owner),
        ports={"http": contract.PORT_SERVICE},
        env=build_token_env(service.token_secret)
        + build_env(vllm_env)
        + _build_endpoint_env(service)
        + build_tracing_env(service.owner),
        probes=build_probes("http", _startup_seconds(service)),
        volumes=[
            _build_config_volume(service),
            Volume("scratch", {"emptyDir": disk}, contract.PATH_SCRATCH),
            Volume("tmp", {"emptyDir": disk}, "/tmp"),
            *([vllm_sidecar.SOCKET_VOLUME] if service.has_sidecar else []),
            *([_build_sandbox_volume(service)] if service.sandbox else []),
        ],
        sidecar=vllm_sidecar.build_sidecar(settings, defaults, sources, hangs),
        grace_seconds=_PRE_STOP_SECONDS + _find_grace_seconds(service) + _DRAIN_SECONDS,
        drain_seconds=_PRE_STOP_SECONDS,
        container_security={"readOnlyRootFilesystem": True},
        service_account=service.name if service.sandbox else "",
    )


def _find_grace_seconds(service: HostedService) -> int:
    """Return how long a server that is to end finishes what it has accepted."""
    seconds = service.settings.timeout_seconds
    return min(seconds, _MAX_EPISODE_DRAIN_SECONDS) if service.calls_policy else seconds


def _read_by_server(service: HostedService) -> dict[str, Any]:
    settings = read_settings(service.settings, pods.POD_FIELDS | _READ_BY_DRIVER)
    return settings | ({"framework": service.framework} if service.framework else {})


def _startup_seconds(service: HostedService) -> int:
    settings = service.settings
    if service.has_sidecar and (model := settings.served_model):
        return model.startup_seconds
    function = settings.function
    return _STARTUP_SECONDS + (function.import_timeout_seconds if function else _STARTUP_SECONDS)


def _build_endpoint_env(service: HostedService) -> list[Manifest]:
    """The key of a judge's or a user's endpoint, and the Service whose replicas share its rate limits."""
    endpoint = service.settings.endpoint
    env: list[Manifest] = []
    if endpoint and endpoint.api_key_secret_ref:
        reference = {"secretKeyRef": endpoint.api_key_secret_ref.to_manifest()}
        env.append({"name": contract.ENV_JUDGE_API_KEY, "valueFrom": reference})
    if endpoint and endpoint.limits != EndpointLimits():
        env += build_env({contract.ENV_PEERS: service.name})
    return env


def _build_sandbox_volume(service: HostedService) -> Volume:
    items = [{"key": contract.FILE_SANDBOX, "path": contract.FILE_SANDBOX}]
    source = {"secret": {"secretName": service.sandbox_secret, "items": items}}
    return Volume("sandbox", source, contract.PATH_SANDBOX, read_only=True)


def _build_config_volume(service: HostedService) -> Volume:
    """service.yaml and function.py: inline source from the service's ConfigMap, else from the user's."""
    reference = service.settings.function.config_map_key_ref if service.settings.function else None
    source: Manifest = {"configMap": {"name": service.name}}
    if reference is not None:
        function = {"name": reference.name, "items": [{"key": reference.key, "path": contract.FILE_FUNCTION}]}
        source = {"projected": {"sources": [source, {"configMap": function}]}}
    return Volume("config", source, contract.PATH_CONFIG, read_only=True)
