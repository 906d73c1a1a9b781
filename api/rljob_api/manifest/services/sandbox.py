"""spec.agent.tools[].sandbox: where code that the policy writes runs."""

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from rljob_api.manifest import base
from rljob_api.manifest.base import PathText, Rule, ShortText, Spec
from rljob_api.manifest.quantity import Size, size_within
from rljob_api.manifest.roles import Resources
from rljob_api.manifest.services.function import PythonFunction

SANDBOX_MODULE: Final = "rljob_service.worker.code.code_sandbox"
"""Module of the reward image: runs the code that the policy writes."""


class Sandbox(Spec):
    """Where code that the policy writes runs. See docs/sandboxes.md."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("provider", "image"),
            "must be agentSandbox with image, warmReplicas, runtimeClassName or resources: provider process uses the "
            "Pods of the tool",
            "set provider: agentSandbox, or set these fields of the tool",
            lambda sandbox: sandbox.provider == "agentSandbox" or not _has_pods(sandbox),
            "(has(self.provider) && self.provider == 'agentSandbox') || (!has(self.image) && !has(self.warmReplicas) "
            "&& !has(self.runtimeClassName) && !has(self.resources))",
        ),
        size_within("maxMemory", "64Mi"),
    )

    provider: Literal["process", "agentSandbox"] = "process"
    """process: each call is a new process in the tool's own Pods, with the limits of a reward's function and an empty
    folder. agentSandbox: each episode claims a Pod from a warm pool of kubernetes-sigs/agent-sandbox, which keeps its
    files from call to call; on a cluster alone."""
    languages: list[Literal["python", "shell"]] = Field(default=["python"], min_length=1, max_length=2)
    """What the model may run: python adds the tool `run_python(code)`, shell adds `run_shell(command)`."""
    requirements: list[Annotated[str, Field(min_length=1, max_length=512, pattern=base.REQUIREMENT_PATTERN)]] = Field(
        default=[], max_length=256
    )
    """process: packages that the code may import, as lines of a pip requirements file without options. Each Pod
    installs them once at startup. With agentSandbox the image has them."""
    max_memory: Size = Size("1Gi")
    """process: maximum address space of each process of a call."""
    image: PathText | None = None
    """agentSandbox: image with /bin/sh and python3 (3.9 or later). Null: the operator's reward image."""
    warm_replicas: int | None = Field(default=None, ge=0, le=4096)
    """agentSandbox: Pods that wait for an episode. Null: as many as one step has episodes, at most 64."""
    runtime_class_name: ShortText | None = None
    """agentSandbox: RuntimeClass of the sandboxes, such as gvisor or kata. Null: the cluster's default."""
    resources: Resources | None = None
    """agentSandbox: requests and limits of a sandbox. What they leave out: requests of 250m CPU, 512Mi of memory and
    1Gi of ephemeral storage, and limits of 1 CPU and the same memory and storage."""

    def as_function(self, timeout_seconds: int, max_characters: int) -> PythonFunction:
        """Return what the tool's server runs. `max_characters`: of a result."""
        arguments = {"timeout_seconds": timeout_seconds, "max_characters": max_characters}
        return PythonFunction(
            module=SANDBOX_MODULE,
            entrypoint="Sandbox",
            factory_args={"provider": self.provider, "languages": self.languages, **arguments},
            requirements=self.requirements,
            max_memory=self.max_memory,
            network=self.provider == "agentSandbox",
        )


def _has_pods(sandbox: Sandbox) -> bool:
    fields = (sandbox.image, sandbox.warm_replicas, sandbox.runtime_class_name, sandbox.resources)
    return any(field is not None for field in fields)
