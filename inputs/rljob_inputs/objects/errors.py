"""Errors of object storage in one line: bucket, key, the right that is missing, and the fix. Pure.

Owns the reading of botocore's and fsspec's errors, by their names and codes, since neither may be installed.
Invariant: a failure that may pass is a TransientError; a refusal and what does not exist are UserErrors.
"""

import errno
from collections.abc import Iterator

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_api.wire.redaction import Redactor
from rljob_inputs.findings import first_line
from rljob_inputs.objects.access import ObjectAccess, split_url

_CREDENTIALS = "set spec.objectStorage.secretRef, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for a run here"
_RIGHTS = {
    **dict.fromkeys(("ListObjects", "ListObjectsV2", "HeadBucket"), "s3:ListBucket"),
    **dict.fromkeys(("GetObject", "HeadObject"), "s3:GetObject"),
    **dict.fromkeys(("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"), "s3:PutObject"),
    **dict.fromkeys(("DeleteObject", "DeleteObjects"), "s3:DeleteObject"),
}
"""The right that each request needs, as policies name it."""
_BAD_CREDENTIALS = frozenset(
    ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "ExpiredTokenException")
)
_OTHER_REGION = frozenset(("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"))
_NO_CREDENTIALS = frozenset(("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"))
_UNAVAILABLE = frozenset(
    ("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "RequestTimeTooSkewed", "Throttling")
)
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors of this machine's disk. Not EIO: s3fs raises it for answers of the storage that it does not know."""


class RefusedObjectError(UserError):
    """The storage does not have an object or a bucket, or not for these credentials."""


class MissingObjectError(RefusedObjectError):
    """There is no such bucket or object."""


class ChangedObjectsError(UserError):
    """Objects are not of the version that a job reads."""


class CopyError(UserError):
    """This machine's disk does not take a copy."""


class StorageAwayError(TransientError):
    """The storage does not answer, or cannot serve the request now."""


def explain(error: BaseException, url: str, right: str, access: ObjectAccess) -> RLJobError:
    """Return the error of RLJob for one of a client. `right`: what was tried, as s3:GetObject; of S3, the request that
    the error names is more exact."""
    bucket, _ = split_url(url)
    code, operation = _read_code(error)
    names = {type(each).__name__ for each in _chain(error)}
    right = _RIGHTS.get(operation, right)
    if code == "NoSuchBucket":
        return MissingObjectError(f"{url}: the bucket {bucket} does not exist at {access.place}; correct its name")
    if code in _BAD_CREDENTIALS:
        return RefusedObjectError(
            f"{url}: {access.place} refuses {access.identity} ({code}); correct it: {_CREDENTIALS}"
        )
    if code in _OTHER_REGION:
        return RefusedObjectError(
            f"{url}: the bucket {bucket} is in another region ({code}); set spec.objectStorage.region, or AWS_REGION"
        )
    if names & _NO_CREDENTIALS:
        return RefusedObjectError(f"{url}: no credentials were found; {_CREDENTIALS}")
    is_refusal = isinstance(error, (PermissionError, FileNotFoundError)) or code in ("AccessDenied", "403", "404")
    if code in _UNAVAILABLE or not is_refusal:
        # It may contain the URL of the request, with the parameters that sign it.
        reason = code or Redactor().hide(f"{type(error).__name__}: {first_line(error)}")
        return StorageAwayError(
            f"{url}: cannot reach the object storage at {access.place} ({reason}); check the network, or set "
            "spec.objectStorage.endpoint"
        )
    if isinstance(error, FileNotFoundError):
        return describe_missing(url, access)
    return RefusedObjectError(
        f"{url}: {access.identity} lacks {right} on the bucket {bucket}; grant it, or use other credentials: "
        f"{_CREDENTIALS}"
    )


def describe_changed(url: str) -> ChangedObjectsError:
    """Return the error for objects that another process of the job has read in another version."""
    return ChangedObjectsError(
        f"{url} changed after the run began, and this machine has no copy of the version that the head read; restore "
        "it, or start a new run"
    )


def find_disk_error(error: BaseException) -> OSError | None:
    """Return the error of this machine's disk in one of a client; None if the storage, or the way to it, failed."""
    return next((each for each in _chain(error) if isinstance(each, OSError) and each.errno in DISK_ERRORS), None)


def describe_missing(url: str, access: ObjectAccess) -> MissingObjectError:
    """Return the error for a key or a prefix without objects."""
    bucket, key = split_url(url)
    return MissingObjectError(
        f"{url}: the bucket {bucket} at {access.place} has no object {key or 'at all'}; correct the key"
    )


def _read_code(error: BaseException) -> tuple[str, str]:
    """Return the code and the request of botocore's ClientError; empty of another error."""
    for each in _chain(error):
        response = getattr(each, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            return str(response["Error"].get("Code") or ""), str(getattr(each, "operation_name", ""))
    return "", ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__
