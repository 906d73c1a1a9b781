"""The objects of other kinds in a job's file: kubectl applies them, and `rljob run` reads functions from ConfigMaps.

Invariant: a job is changed only where its `configMapKeyRef` names a ConfigMap of the file.
"""

from collections.abc import Iterable, Iterator

from rljob_api.manifest.job import RLJob
from rljob_api.read.documents import Document, Problem, parse_path


def find_object_problems(documents: Iterable[Document]) -> Iterator[Problem]:
    """Yield why kubectl would refuse other objects, as far as their contents do not matter."""
    for document in documents:
        yield from document.problems
        metadata = document.data.get("metadata")
        if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
            yield Problem("metadata.name", document.line_of(("metadata",)), "is required: the name of the object")


def describe(document: Document) -> str:
    """`Secret keys (line 3)`."""
    return f"{document.data['kind']} {document.data['metadata']['name']} (line {document.line_of(())})"


def inline_config_maps(
    job: RLJob, document: Document, others: Iterable[Document]
) -> tuple[RLJob, list[Document], list[Problem]]:
    """Replace references to functions in the file's ConfigMaps by their source. Return also the other objects that
    this leaves unused, and references to keys that a ConfigMap does not have."""
    others = list(others)
    maps = {o.data["metadata"]["name"]: o for o in others if o.data["kind"] == "ConfigMap" and _is_with(o, job)}
    job, problems, used = job.model_copy(deep=True), [], set()
    for path, function in job.spec.functions.items():
        reference = function.config_map_key_ref
        if reference is None or reference.name not in maps:
            continue
        used.add(reference.name)
        data = maps[reference.name].data.get("data") or {}
        source = data.get(reference.key)
        if isinstance(source, str) and source:
            function.inline, function.config_map_key_ref = source, None
        else:
            place = f"{path}.configMapKeyRef.key"
            keys = ", ".join(map(str, data)) or "no keys"
            message = f"must be a key of the ConfigMap {reference.name}, which has {keys}, got {reference.key}"
            problems.append(Problem(place, document.line_of(parse_path(place)), message))
    unused = [other for other in others if other.data["metadata"]["name"] not in used or other not in maps.values()]
    return job, unused, problems


def _is_with(document: Document, job: RLJob) -> bool:
    return (document.data["metadata"].get("namespace") or "default") == job.metadata.namespace
