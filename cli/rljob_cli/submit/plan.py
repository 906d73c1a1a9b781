"""The objects that take a job and its files to a cluster. Pure.

Functions and small data become one immutable ConfigMap, whose name has a digest of its contents: a changed file is a
changed spec, which the operator notices. The head mounts the data. Models and larger data are copied to a claim.
Invariant: the manifests that were given stay unchanged.
"""

import base64
import copy
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob_api.errors import UserError
from rljob_api.read.documents import format_path
from rljob_cli.options import ClaimOptions
from rljob_cli.submit.sources import MAX_SMALL_BYTES, LocalSource, Tree, find_sources, get_value
from rljob_core.backend import Manifest
from rljob_core.children.common import AGENT, HEAD, REWARD
from rljob_core.children.merge import merge

PATH_FILES = "/mnt/files"
"""Where the head mounts the ConfigMap."""
LABEL_FILES = "rljob.dev/files-of"
_VOLUME = "submitted-files"
_EXECUTABLE = 0o755
_INVALID_IN_KEY = re.compile(r"[^-._a-zA-Z0-9]")
_MAX_NAME_CHARACTERS = 253
_GIB = 2**30
_CLAIM_HEADROOM = 1.2


@dataclass(frozen=True)
class Upload:
    """A file or folder to copy to `folder` of the claim. Its name has a digest, so that it is copied once."""

    path: str
    """As written in the job."""
    tree: Tree
    folder: str


@dataclass(frozen=True)
class Submission:
    job: Manifest
    others: list[Manifest]
    """The file's other objects."""
    config_map: Manifest | None = None
    claim: Manifest | None = None
    """A claim to create."""
    claim_name: str = ""
    uploads: list[Upload] = field(default_factory=list)

    @property
    def objects(self) -> list[Manifest]:
        """Return all objects, in the order in which they must be applied."""
        return [*filter(None, (self.claim, self.config_map)), *self.others, self.job]


@dataclass(frozen=True)
class _Sourced:
    """A source, and where in the manifests it is."""

    manifest: Manifest
    source: LocalSource
    tree: Tree


def plan_submission(
    manifests: Sequence[Manifest],
    trees: Mapping[str, Tree],
    namespace: str,
    options: ClaimOptions,
) -> Submission:
    """Plan the objects. `manifests` are the job and the other objects of its file; `trees` has what each path names.

    Raise UserError if an object is in another namespace, or the functions are too large."""
    copies = [_place(copy.deepcopy(dict(manifest)), namespace) for manifest in manifests]
    job, *others = copies
    name = job["metadata"]["name"]
    sourced = [
        _Sourced(manifest, source, trees[source.path])
        for manifest in copies
        if manifest["kind"] in ("RLJob", "RewardModel")
        for source in find_sources(manifest)
    ]
    small = _choose_small(sourced)
    config_map = _build_config_map(name, namespace, small) if small else None
    if config_map:
        _use_config_map(job, config_map["metadata"]["name"], small)
    large = [item for item in sourced if item not in small]
    claim_name = options.claim or f"{name}-files"
    # Two fields may name the same files.
    found = [_use_claim(item, claim_name, name) for item in large]
    uploads = list({upload.folder: upload for upload in found}.values())
    claim = _build_claim(claim_name, name, namespace, uploads, options) if uploads and not options.claim else None
    return Submission(job, others, config_map, claim, claim_name if uploads else "", uploads)


def _place(manifest: Manifest, namespace: str) -> Manifest:
    metadata = manifest.setdefault("metadata", {})
    own = metadata.get("namespace") or namespace
    if own != namespace:
        what = f"{manifest['kind']} {metadata.get('name')}"
        raise UserError(f"{what}: metadata.namespace is {own}, and the command's is {namespace}; pass -n {own}")
    metadata["namespace"] = namespace
    return manifest


def _choose_small(sourced: list[_Sourced]) -> list[_Sourced]:
    """Return what the ConfigMap holds: all functions and programs, and as many datasets as fit, the smallest first."""
    functions = [item for item in sourced if item.source.kind in ("function", "program")]
    data = [item for item in sourced if item.source.kind == "data"]
    if _count_bytes(functions) > MAX_SMALL_BYTES:
        largest = max(functions, key=lambda item: item.tree.num_bytes)
        limit = f"all functions of a job may have {MAX_SMALL_BYTES // 1024} KiB"
        remedy = "put large tables into a package (function.requirements), or into the reward's image"
        if largest.source.kind == "program":
            remedy = "use a folder that has the program alone, or put it into runner.image and set its absolute path"
        raise UserError(f"{largest.source.field}: {largest.source.path} is too large: {limit}; {remedy}")
    small = functions
    for item in sorted(data, key=lambda item: item.tree.num_bytes):
        if _count_bytes([*small, item]) <= MAX_SMALL_BYTES:
            small = [*small, item]
    return [item for item in sourced if item in small]


def _count_bytes(items: list[_Sourced]) -> int:
    return sum(item.tree.num_bytes for item in items)


def _build_config_map(job: str, namespace: str, items: list[_Sourced]) -> Manifest:
    data: dict[str, str] = {}
    binary: dict[str, str] = {}
    for item in items:
        for file, key in zip(item.tree.files, _keys(item), strict=True):
            content = file.content or b""
            try:
                data[key] = content.decode()
            except UnicodeDecodeError:
                binary[key] = base64.b64encode(content).decode()
    digest = hashlib.sha256(repr((sorted(data.items()), sorted(binary.items()))).encode()).hexdigest()[:10]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job}-files-{digest}", "namespace": namespace, "labels": {LABEL_FILES: job}},
        "immutable": True,
        **({"data": data} if data else {}),
        **({"binaryData": binary} if binary else {}),
    }


def _keys(item: _Sourced) -> list[str]:
    """Return the key of each file: LABEL.NAME, such as correct.reward.py and train.train.jsonl."""
    names = [f"{item.source.label}.{_INVALID_IN_KEY.sub('-', file.name)}" for file in item.tree.files]
    if len({*names}) < len(names) or any(len(name) > _MAX_NAME_CHARACTERS for name in names):
        remedy = "use short names of letters, digits, dots and dashes"
        raise UserError(
            f"{item.source.field}: the files of {item.source.path} would have equal keys in the ConfigMap; {remedy}"
        )
    return names


def _use_config_map(job: Manifest, name: str, items: list[_Sourced]) -> None:
    """Let functions refer to the ConfigMap. The head mounts the data, and a server a program, or a function of several
    files."""
    data = []
    for item in items:
        label, parent = item.source.label, get_value(item.manifest, item.source.location[:-1])
        is_data = item.source.kind == "data"
        # The name of data is the same one as with `rljob run`: functions get it as data_source.
        folder = f"{label}/{item.tree.name}" if item.tree.is_folder and is_data else label
        mounted = [
            {"key": key, "path": f"{folder}/{file.name}"}
            for key, file in zip(_keys(item), item.tree.files, strict=True)
        ]
        path = f"{PATH_FILES}/{folder}" + ("" if item.tree.is_folder else f"/{item.tree.name}")
        if is_data:
            data += mounted
            parent["source"] = path
        elif item.source.kind == "program":
            parent["workingDir"] = path
            executable = [each | {"mode": _EXECUTABLE} for each in mounted]
            _mount(parent, AGENT, name, executable, format_path(item.source.location[:-1]))
        elif len(mounted) == 1:
            del parent["file"]
            parent["configMapKeyRef"] = {"name": name, "key": mounted[0]["key"]}
        else:
            parent["file"] = path
            place = item.source.location[:-2]
            container = AGENT if place[1:2] == ("agent",) else REWARD
            _mount(get_value(item.manifest, place), container, name, mounted, format_path(place))
    if data:
        job["spec"]["head"] = head = job["spec"].get("head") or {}
        _mount(head, HEAD, name, data, "spec.head")


def _mount(role: dict[str, Any], container: str, config_map: str, items: Sequence[Manifest], path: str) -> None:
    """Mount keys of the ConfigMap through the role's template."""
    volume = {"name": _VOLUME, "configMap": {"name": config_map, "items": items}}
    mount = {"name": _VOLUME, "mountPath": PATH_FILES, "readOnly": True}
    added = {"spec": {"volumes": [volume], "containers": [{"name": container, "volumeMounts": [mount]}]}}
    role["template"] = merge(role.get("template") or {}, added, f"{path}.template")


def _use_claim(item: _Sourced, claim: str, job: str) -> Upload:
    folder = f"{job}/{item.tree.digest}"
    parent = get_value(item.manifest, item.source.location[:-1])
    parent["source"] = f"pvc://{claim}/{folder}/{item.tree.name}"
    return Upload(item.source.path, item.tree, folder)


def _build_claim(name: str, job: str, namespace: str, uploads: list[Upload], options: ClaimOptions) -> Manifest:
    num_bytes = sum(upload.tree.num_bytes for upload in uploads)
    size = options.claim_size or f"{max(1, math.ceil(_CLAIM_HEADROOM * num_bytes / _GIB))}Gi"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace, "labels": {LABEL_FILES: job}},
        "spec": {
            "accessModes": [options.access_mode],
            "resources": {"requests": {"storage": size}},
            **({"storageClassName": options.storage_class} if options.storage_class else {}),
        },
    }


def build_owners_patch(owners: Sequence[Manifest]) -> Manifest:
    """Build the patch after which Kubernetes deletes an object with the last of its owners, as stored."""
    references = [
        {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
        }
        for owner in owners
    ]
    return {"metadata": {"ownerReferences": references}}
