"""Converts a container of a Pod into a local process: command, environment, folders. Pure.

Invariant: every mount path in command, arguments and environment is replaced by the local folder of that mount, except
/tmp: this machine has it, too, and RLJob's own values name no file there.
"""

import base64
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_api.wire.contract import ENV_CONTAINER_ENV, ENV_GRACE_SECONDS, ENV_HOSTS_FILE
from rljob_cli.manifests import labels_of, namespace_of
from rljob_core.backend import Manifest
from rljob_core.plan.observed_job import name_of

Find = Callable[[str, str], Manifest | None]
"""(kind, name) -> the object in the Pod's namespace, or None."""
_TEMPORARY = "/tmp"
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class ContainerConfigError(Exception):
    """The container refers to something that does not exist (yet)."""


@dataclass(frozen=True)
class Mount:
    path: str
    local: Path


@dataclass(frozen=True)
class Process:
    argv: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True)
class PodContext:
    pod: Manifest
    address: str
    mounts: tuple[Mount, ...]
    """The mounts of this container."""
    hosts_file: Path
    find: Find
    base_env: Mapping[str, str]
    """The environment of every process. The container's env overrides it."""


def build_process(container: Manifest, context: PodContext) -> Process:
    env = build_env(container, context)
    command = [*container.get("command", []), *container.get("args", [])]
    if not container.get("command"):
        where = f"container {container['name']} of Pod {name_of(context.pod)}"
        raise ContainerConfigError(f"{where} has no command; set one, because the local backend does not use images")
    argv = [replace_mounts(expand(word, env), context.mounts) for word in command]
    if argv[0] in ("python", "python3"):
        argv[0] = sys.executable
    local = {name: replace_mounts(value, context.mounts) for name, value in env.items()}
    hosts = {ENV_HOSTS_FILE: str(context.hosts_file), "HOSTNAME": name_of(context.pod)}
    # How long a Pod has to end is this machine's, whatever its template says.
    grace = {name: value for name, value in context.base_env.items() if name == ENV_GRACE_SECONDS}
    return Process(tuple(argv), {**context.base_env, **hosts, **local, **grace, ENV_CONTAINER_ENV: " ".join(local)})


def build_env(container: Manifest, context: PodContext) -> dict[str, str]:
    """Return envFrom and env with expanded references, in Kubernetes' order."""
    env: dict[str, str] = {}
    for source in container.get("envFrom", []):
        for kind, key in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if key in source:
                values = read_data(kind, source[key], context.find)
                env.update({source.get("prefix", "") + name: value.decode() for name, value in values.items()})
    for entry in container.get("env", []):
        if "valueFrom" in entry:
            value = _value_from(entry["valueFrom"], context)
            if value is None:
                continue
        else:
            value = expand(str(entry.get("value", "")), env)
        env[entry["name"]] = value
    return env


def read_data(kind: str, reference: Manifest, find: Find) -> dict[str, bytes]:
    """Return the keys of a ConfigMap or Secret; empty if it is optional and missing."""
    name = reference.get("name") or reference.get("secretName", "")
    found = find(kind, name)
    if found is None:
        if reference.get("optional"):
            return {}
        raise ContainerConfigError(f'{kind.lower()} "{name}" not found')
    data = (found.get("data") or {}).items()
    return {key: base64.b64decode(value) if kind == "Secret" else value.encode() for key, value in data}


def _value_from(source: Manifest, context: PodContext) -> str | None:
    if "fieldRef" in source:
        return _field(source["fieldRef"]["fieldPath"], context)
    for kind, key in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if key in source:
            reference = source[key]
            values = read_data(kind, reference, context.find)
            if reference["key"] in values:
                return values[reference["key"]].decode()
            if reference.get("optional"):
                return None
            raise ContainerConfigError(f"couldn't find key {reference['key']} in {kind} {reference['name']}")
    raise ContainerConfigError(f"env valueFrom {', '.join(source)} is not supported by the local backend")


def _field(path: str, context: PodContext) -> str:
    metadata = context.pod["metadata"]
    fields = {
        "metadata.name": name_of(context.pod),
        "metadata.namespace": namespace_of(context.pod),
        "metadata.uid": str(metadata.get("uid", "")),
        "spec.nodeName": "localhost",
        "status.hostIP": context.address,
        "status.podIP": context.address,
    }
    if path in fields:
        return fields[path]
    keyed = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if keyed:
        table = labels_of(context.pod) if keyed[1] == "labels" else metadata.get("annotations", {})
        return str(table.get(keyed[2], ""))
    raise ContainerConfigError(f"fieldRef {path} is not supported by the local backend")


def expand(text: str, env: Mapping[str, str]) -> str:
    """Expand $(NAME) references as Kubernetes does: unknown ones stay, and $$ is a dollar sign."""
    return _REFERENCE.sub(lambda match: "$" if match[0] == "$$" else env.get(match[1], match[0]), text)


def replace_mounts(text: str, mounts: tuple[Mount, ...]) -> str:
    """Replace mount paths that are a complete prefix of a path: longest first, each occurrence once."""
    by_path = {path: str(mount.local) for mount in mounts if (path := mount.path.rstrip("/")) != _TEMPORARY}
    if not by_path:
        return text
    paths = "|".join(re.escape(path) for path in sorted(by_path, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])({paths})(?![\w.-])", lambda match: by_path[match[1]], text)
