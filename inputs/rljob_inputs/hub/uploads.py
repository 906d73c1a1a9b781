"""A folder becomes a commit of a model repository on the Hub. Invariant: only what the user says gets public."""

from pathlib import Path

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_inputs.errors import first_line
from rljob_inputs.hub.repository import HubAccess, RefusedError, repository_name, status_of

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
