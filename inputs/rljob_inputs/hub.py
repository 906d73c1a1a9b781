"""The Hugging Face Hub: which repository a source names, what it contains, and one-line errors.

A repository of the Hub, found by one request: its commit, its files, and downloads pinned to that commit.

Leaves weights to the programs that load them. Invariant: without network or permission it fails after one request, in
one line; the libraries that load would retry for more than a minute first.

A folder becomes one commit of a model repository. Invariant: only what the user says gets public.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_inputs.findings import InputError, first_line
from rljob_inputs.objects.access import ObjectAccess

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Kind = Literal["model", "dataset"]
_TIMEOUT_SECONDS = 3.0
_REFUSALS = (401, 403, 404)
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PAGE = re.compile(
    r"(?:(?:https?://)?(?:huggingface\.co|hf\.co)/(?:datasets/)?|hf:/?(?!/))([^/?#]+/[^/?#]+)(?:/(?:tree/main/?)?)?"
)
_FILE = re.compile(r"\.(jsonl|json|csv|tsv|parquet|gz|bz2|xz|zst|txt|gguf|safetensors)$")
_MARKERS = {"model": "config.json", "dataset": "README.md"}
"""A file that nearly every repository of a kind has: found in the cache, it names the cached commit."""


class RefusedError(UserError):
    """The Hub does not have the repository, or not for this token."""


class MissingRevisionError(RefusedError):
    """The repository has no such revision."""


@contextlib.contextmanager
def at_source(field: str) -> Iterator[None]:
    """Turn UserErrors into InputErrors of the field's source or revision, unless they are of a field already."""
    try:
        yield
    except InputError:
        raise
    except UserError as error:
        name = "revision" if isinstance(error, MissingRevisionError) else "source"
        raise InputError(f"{field}.{name}", str(error)) from error


@dataclass(frozen=True)
class HubAccess:
    """Address and token of the Hub. None: what huggingface_hub finds (its environment, `hf auth login`). And of the
    object storage that a job may use in addition."""

    endpoint: str | None = None
    token: str | None = None
    objects: ObjectAccess = field(default_factory=ObjectAccess)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> HubAccess:
        endpoint = (environment.get("HF_ENDPOINT") or "").rstrip("/") or None
        return cls(endpoint, environment.get("HF_TOKEN") or None, ObjectAccess.from_environment(environment))

    @property
    def url(self) -> str:
        from huggingface_hub import constants

        return self.endpoint or constants.ENDPOINT

    def has_token(self) -> bool:
        from huggingface_hub import get_token

        return bool(self.token or get_token())

    def client(self) -> HfApi:
        from huggingface_hub import HfApi, constants

        # Else the first call requests a list for its user agent, which waits for 3 s if the Hub does not answer.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        return HfApi(endpoint=self.endpoint, token=self.token)


@dataclass(frozen=True)
class Repository:
    kind: Kind
    name: str
    """org/name"""
    commit: str
    files: Mapping[str, int]
    """Bytes by path. 0: unknown."""
    access: HubAccess
    is_cached: bool = False
    """The Hub did not answer, and this is the newest commit of the local cache."""

    def download(self, path: str) -> Path:
        """Return the local path of a small file, from the cache or downloaded."""
        return Path(
            self.access.client().hf_hub_download(
                self.name, path, repo_type=self.kind, revision=self.commit, local_files_only=self.is_cached
            )
        )


@functools.cache
def find_repository(source: str, kind: Kind, revision: str | None, access: HubAccess) -> Repository:
    """Return the repository of hf://org/name at a revision. A process, and those that it forks, ask once.

    Raise RefusedError if it is missing or forbidden, and TransientError if the Hub cannot be reached and the cache does
    not have it."""
    from huggingface_hub import errors

    name = repository_name(source)
    find: Any = access.client().model_info if kind == "model" else access.client().dataset_info
    try:
        info = find(name, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS)
    except errors.HFValidationError as error:
        raise UserError(f"{source} is not a repository of the Hub: {first_line(error)}") from error
    except Exception as error:  # the types of the HTTP client depend on the release of huggingface_hub
        if status_of(error) in _REFUSALS:
            refusal = MissingRevisionError if isinstance(error, errors.RevisionNotFoundError) else RefusedError
            raise refusal(_describe_refusal(error, source, kind, revision, access)) from error
        if cached := _find_cached(name, kind, revision, access):
            return cached
        raise TransientError(
            f"cannot reach the Hub at {access.url} for {source}, which its cache lacks ({type(error).__name__}: "
            f"{first_line(error)}); check the network, set spec.hub.endpoint to a mirror, or use a local folder"
        ) from error
    files = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    return Repository(kind, name, str(info.sha), files, access)


@contextlib.contextmanager
def offline_mode() -> Iterator[None]:
    """Let the libraries use their caches at once, after the Hub did not answer: they would retry for half a minute."""
    import datasets
    from huggingface_hub import constants

    modules: tuple[Any, ...] = (constants, datasets.config)
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def read_source(text: str, folder: Path) -> str:
    """Return the source of a manifest for what its users write: org/name or the address of its page is on the Hub,
    unless `folder` has org/; ~ and variables of the shell are this machine's paths, and start at `folder` then."""
    if page := _PAGE.fullmatch(text):
        return f"hf://{page[1]}"
    if _NAME.fullmatch(text) and not _FILE.search(text) and not (folder / text).parent.exists():
        return f"hf://{text}"
    path = os.path.expanduser(os.path.expandvars(text))
    is_local = path != text and not (folder / text).exists() and os.path.isabs(path)
    return os.path.relpath(path, folder) if is_local else text


def name_model(source: str) -> str:
    """Return org/name of hf://, or the name of a folder."""
    return repository_name(source) if source.startswith("hf://") else source.rstrip("/").rpartition("/")[2]


def repository_name(source: str) -> str:
    """Return org/name of a source hf://org/name."""
    return source.removeprefix("hf://").rstrip("/")


def _describe_refusal(error: Exception, source: str, kind: Kind, revision: str | None, access: HubAccess) -> str:
    from huggingface_hub import errors

    page = f"{access.url}/{'datasets/' if kind == 'dataset' else ''}{repository_name(source)}"
    remedy = "set spec.hub.tokenSecretRef, or HF_TOKEN for a run on this machine"
    if isinstance(error, errors.GatedRepoError):
        if access.has_token():
            return f"{source} is gated, and the account of the token has no access: request it at {page}"
        return f"{source} is gated: accept its terms at {page}, and {remedy}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{source} has no revision {revision}; see {page}"
    if isinstance(error, errors.DisabledRepoError):
        return f"{source} is disabled by the Hub; see {page}"
    if isinstance(error, errors.RepositoryNotFoundError) or status_of(error) == 404:
        if access.has_token():
            return f"{kind} {source} does not exist at {access.url}, or the token must not read it; check the name"
        return f"{kind} {source} does not exist at {access.url}, or is private; check the name, or {remedy}"
    return f"the Hub refuses the token for {source} (HTTP {status_of(error)}); {remedy.replace('set', 'correct', 1)}"


def _find_cached(name: str, kind: Kind, revision: str | None, access: HubAccess) -> Repository | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, _MARKERS[kind], repo_type=kind, revision=revision)
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    paths = [Path(root, file) for root, _, files in os.walk(folder) for file in files]
    files = {str(path.relative_to(folder)): path.stat().st_size for path in paths if path.exists()}
    return Repository(kind, name, folder.name, files, access, is_cached=True)


def status_of(error: Exception) -> int:
    """Return the HTTP status; 0 without a response."""
    return getattr(getattr(error, "response", None), "status_code", 0)


_FORBIDDEN = (401, 402, 403)
_TOKEN = "set HF_TOKEN to a token with the right to write"


def require_private(source: str, access: HubAccess, *, may_be_public: bool = False) -> None:
    """Raise UserError if hf://org/name exists and is public, unless it may be, or if there is no token to write with;
    TransientError if the Hub does not answer."""
    from huggingface_hub import errors

    name = repository_name(source)
    if not access.has_token():
        raise RefusedError(f"{source}: no token for the Hub at {access.url}; {_TOKEN}")
    try:
        info = access.client().model_info(name)
    except errors.RepositoryNotFoundError:
        return
    except errors.HFValidationError as error:
        raise UserError(f"{source} is no name of a repository: {error}") from error
    except Exception as error:  # the types of the HTTP client depend on the release of huggingface_hub
        raise _explain(error, source, access) from error
    if not info.private and not may_be_public:
        raise UserError(f"{source}: exists and is public; choose another name, or pass --public")


def upload_model(folder: Path, source: str, access: HubAccess, *, is_public: bool, message: str) -> str:
    """Write a folder to hf://org/name in one commit, and create the repository if it is missing: a private one unless
    `is_public`. Return the address of its page. Raise RefusedError if the token may not write, and TransientError."""
    name, client = repository_name(source), access.client()
    try:
        if not client.repo_exists(name):
            client.create_repo(name, private=not is_public)
        client.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except Exception as error:
        raise _explain(error, source, access) from error
    return f"{access.url}/{name}"


def _explain(error: Exception, source: str, access: HubAccess) -> RLJobError:
    reason = first_line(error) or type(error).__name__
    status = status_of(error)
    if status in _FORBIDDEN:
        refused = f"{source}: the token must not write there (HTTP {status})"
        return RefusedError(f"{refused}; {_TOKEN}, or choose a name of your own")
    if 400 <= status < 500:
        return UserError(f"{source}: the Hub at {access.url} refuses it (HTTP {status}): {reason}")
    failed = f"{source}: the Hub at {access.url} cannot be used ({type(error).__name__}: {reason})"
    return TransientError(f"{failed}; check the network, and try again")
