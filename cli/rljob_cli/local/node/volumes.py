"""The local folders of a Pod's volumes: creates, fills and removes them.

Writes ConfigMaps and Secrets as files by atomic renames, again whenever the object changes. Refuses `items` and
projected volumes. Invariant: PATH_RUN is always the run's own folder, independent of the volume that is mounted there.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_api.wire.contract import PATH_RUN
from rljob_cli.local.node.podspec import ContainerConfigError, Find, Mount, read_data
from rljob_cli.manifests import containers_of, digest
from rljob_core.backend import Manifest
from rljob_core.plan.observed_job import name_of

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class RunPaths:
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
    kinds = ", ".join(key for key in volume if key != "name")
    if kinds in ("emptyDir", "configMap", "secret"):
        if "items" not in (volume[kinds] or {}):
            return paths.pod(name_of(pod)) / "volumes" / name
        kinds = f"{kinds}.items"
    raise ContainerConfigError(f"volume {name} uses what the local backend does not support: {kinds}")


def prepare(pod: Manifest, paths: RunPaths, find: Find) -> None:
    for volume in pod["spec"].get("volumes", []):
        folder = folder_of(volume, pod, paths)
        if "hostPath" not in volume:
            folder.mkdir(parents=True, exist_ok=True)
    for container in containers_of(pod["spec"]):
        for mount in container.get("volumeMounts", []):
            if mount.get("subPath"):
                local = mounts_of({**container, "volumeMounts": [mount]}, pod, paths)[0].local
                local.parent.mkdir(parents=True, exist_ok=True)
    refresh(pod, paths, find)


def refresh(pod: Manifest, paths: RunPaths, find: Find) -> None:
    for volume in pod["spec"].get("volumes", []):
        for kind, key, mode in (("ConfigMap", "configMap", 0o644), ("Secret", "secret", 0o600)):
            if key in volume:
                _write_files(folder_of(volume, pod, paths), read_data(kind, volume[key], find), mode)


def remove(pod: Manifest, paths: RunPaths) -> None:
    shutil.rmtree(paths.pod(name_of(pod)), ignore_errors=True)
    shutil.rmtree(paths.memory_of(pod), ignore_errors=True)


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file in one step, so that readers see the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    temporary.replace(path)


def _only_at_run(volume: Manifest, pod: Manifest) -> bool:
    """Whether the volume is mounted at PATH_RUN and nowhere else."""
    places = {
        mount["mountPath"].rstrip("/")
        for container in containers_of(pod["spec"])
        for mount in container.get("volumeMounts", [])
        if mount["name"] == volume["name"]
    }
    return places == {PATH_RUN}


def _write_files(folder: Path, files: dict[str, bytes], mode: int) -> None:
    for name, content in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, content, mode)
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
