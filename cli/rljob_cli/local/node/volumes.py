"""The local folders of a Pod's volumes: creates, fills and removes them.

Writes ConfigMaps and Secrets file by file, each by an atomic rename, and again whenever the object changes. Invariant:
PATH_RUN is always the run's own folder, independent of the volume that is mounted there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_api.wire.contract import PATH_RUN
from rljob_cli.local.node.podspec import ContainerConfigError, Find, Mount, read_data
from rljob_cli.manifests import digest
from rljob_operator.backend import Manifest
from rljob_operator.plan.observed_job import name_of

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class RunPaths:
    """The folders of a run."""

    root: Path
    claims: Mapping[str, Path]
    """`--volume CLAIM=DIR`."""

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def local(self) -> Path:
        """The backend's files: folders of Pods, the hosts file."""
        return self.root / ".local"

    @property
    def hosts(self) -> Path:
        return self.local / "hosts"

    @property
    def memory(self) -> Path:
        """emptyDirs with medium Memory. The name depends only on the run folder, so that the next run can clear it."""
        return _SHARED_MEMORY / f"rljob-{digest(str(self.root.resolve()))}"

    def memory_of(self, pod: Manifest) -> Path:
        """Return a short path: that of a Unix socket may have at most 107 bytes."""
        return self.memory / digest(name_of(pod))

    def pod(self, name: str) -> Path:
        return self.local / "pods" / name

    def clear(self) -> None:
        """Remove the files that only a running job needs."""
        shutil.rmtree(self.local / "pods", ignore_errors=True)
        shutil.rmtree(self.memory, ignore_errors=True)


def mounts_of(container: Manifest, pod: Manifest, paths: RunPaths) -> tuple[Mount, ...]:
    """Return the local folder of each of the container's mounts."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    mounts = []
    for mount in container.get("volumeMounts", []):
        path = mount["mountPath"].rstrip("/") or "/"
        if path == PATH_RUN:
            local = paths.root
        elif mount["name"] in volumes:
            local = folder_of(volumes[mount["name"]], pod, paths)
        else:
            raise ContainerConfigError(f"container {container['name']} mounts the unknown volume {mount['name']}")
        mounts.append(Mount(path, local / mount["subPath"] if mount.get("subPath") else local))
    return tuple(mounts)


def folder_of(volume: Manifest, pod: Manifest, paths: RunPaths) -> Path:
    """Return the local folder of a volume."""
    name = volume["name"]
    if "persistentVolumeClaim" in volume:
        claim = volume["persistentVolumeClaim"]["claimName"]
        if claim in paths.claims:
            return paths.claims[claim]
        if _only_at_run(volume, pod):
            return paths.root
        raise ContainerConfigError(f"claim {claim} has no local folder; add --volume {claim}=DIR to `rljob run`")
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"])
    if "emptyDir" in volume and (volume["emptyDir"] or {}).get("medium") == "Memory":
        return paths.memory_of(pod) / name
    if any(kind in volume for kind in ("emptyDir", "configMap", "secret", "projected")):
        return paths.pod(name_of(pod)) / "volumes" / name
    kinds = ", ".join(key for key in volume if key != "name")
    raise ContainerConfigError(f"volume {name} has a type that the local backend does not support: {kinds}")


def prepare(pod: Manifest, paths: RunPaths, find: Find) -> None:
    """Create the volumes of the Pod."""
    for volume in pod["spec"].get("volumes", []):
        folder = folder_of(volume, pod, paths)
        if "hostPath" not in volume:
            folder.mkdir(parents=True, exist_ok=True)
    for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
        for mount in container.get("volumeMounts", []):
            if mount.get("subPath"):
                local = mounts_of({**container, "volumeMounts": [mount]}, pod, paths)[0].local
                local.parent.mkdir(parents=True, exist_ok=True)
    refresh(pod, paths, find)


def refresh(pod: Manifest, paths: RunPaths, find: Find) -> None:
    """Write ConfigMaps and Secrets that have changed."""
    for volume in pod["spec"].get("volumes", []):
        sources = _sources(volume)
        if sources:
            files: dict[str, bytes] = {}
            for kind, source in sources:
                files.update(_project(read_data(kind, source, find), source))
            is_secret = any(kind == "Secret" for kind, _ in sources)
            _write_files(folder_of(volume, pod, paths), files, mode=0o600 if is_secret else 0o644)


def remove(pod: Manifest, paths: RunPaths) -> None:
    """Remove the Pod's own folders."""
    shutil.rmtree(paths.pod(name_of(pod)), ignore_errors=True)
    shutil.rmtree(paths.memory_of(pod), ignore_errors=True)


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file in one step, so that readers see the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    temporary.replace(path)


def _only_at_run(volume: Manifest, pod: Manifest) -> bool:
    """Whether the volume is mounted at PATH_RUN and nowhere else."""
    places = {
        mount["mountPath"].rstrip("/")
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        for mount in container.get("volumeMounts", [])
        if mount["name"] == volume["name"]
    }
    return places == {PATH_RUN}


def _sources(volume: Manifest) -> list[tuple[str, Manifest]]:
    """Return (kind, source) of each ConfigMap and Secret that a volume projects."""
    entries = (volume.get("projected") or {}).get("sources", [volume])
    kinds = (("ConfigMap", "configMap"), ("Secret", "secret"))
    return [(kind, entry[key]) for entry in entries for kind, key in kinds if key in entry]


def _project(values: dict[str, bytes], source: Manifest) -> dict[str, bytes]:
    """Apply `items`: select keys and rename them to paths."""
    if not source.get("items"):
        return values
    missing = [item["key"] for item in source["items"] if item["key"] not in values]
    if missing and not source.get("optional"):
        raise ContainerConfigError(f"references non-existent config key: {', '.join(missing)}")
    return {item["path"]: values[item["key"]] for item in source["items"] if item["key"] in values}


def _write_files(folder: Path, files: dict[str, bytes], mode: int) -> None:
    for name, content in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, content, mode)
    for path in folder.rglob("*"):
        if path.is_file() and str(path.relative_to(folder)) not in files:
            path.unlink()
