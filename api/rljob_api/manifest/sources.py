"""The `source` of a model or a dataset: its forms, their paths in a container, and the rules that validate it; and the
Hub and the object storage that sources come from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from rljob_api.errors import UserError
from rljob_api.manifest.base import ClusterRule, FreeForm, ObjectName, PathText, Rule, ShortText, Spec, Url, exactly_one
from rljob_api.manifest.pod_settings import LocalObjectReference
from rljob_api.wire.contract import PATH_CLAIMS

_REPOSITORY = re.compile(r"[^/]+(/[^/]+)?/?")
_SPLIT = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}"
"""Also the name of a file."""
OBJECT_SCHEMES: Final = ("s3", "gs", "az")
"""Schemes of object storage: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage."""
_FORMS = "hf://org/name, pvc://claim/path, s3://bucket/path"
_JOB = r"[a-z]([-a-z0-9]*[a-z0-9])?(@([0-9]{1,9}|last|best))?"
_FILES_PATTERN = f"hf://[^/]+(/[^/]+)?/?|pvc://[^/]+(/.*)?|({'|'.join(OBJECT_SCHEMES)})://[^/]+(/.*)?"
_SOURCE_CEL = f"!self.source.contains('://') || self.source.matches('^({_FILES_PATTERN})$')"
_MODEL_CEL = f"!self.source.contains('://') || self.source.matches('^({_FILES_PATTERN}|job://{_JOB})$')"
_DATA_CEL = f"!self.source.contains('://') || self.source.matches('^({_FILES_PATTERN}|env://{_SPLIT})$')"


@dataclass(frozen=True)
class Source:
    kind: Literal["hf", "pvc", "absolute", "relative", "env", "object", "job"]
    path: str
    """For hf the repository's id, for env the split, for objects the whole URL, for job its name."""
    claim: str = ""
    """Set for pvc only."""
    step: str = ""
    """Set for job only: a number, last or best."""

    @property
    def is_remote(self) -> bool:
        """Whether programs download it: from the Hub or from object storage."""
        return self.kind in ("hf", "object")

    @property
    def name(self) -> str:
        """The repository's id, the split, or the name of the file or folder, which is the same wherever it is."""
        return self.path if self.kind == "hf" else self.path.rstrip("/").rpartition("/")[2] or self.claim

    @property
    def container_path(self) -> str:
        """The path that a container opens, or hf://org/name, env://split, or the URL of objects."""
        if self.kind in ("hf", "env"):
            return f"{self.kind}://{self.path}"
        assert self.kind != "job", "a job's checkpoint is resolved before anything reads it"
        if self.kind == "pvc":
            return f"{PATH_CLAIMS}/{self.claim}/{self.path}".rstrip("/")
        return self.path


def parse_source(source: str) -> Source:
    """Parse a source. Raises UserError if the scheme is unknown or a part is missing."""
    scheme, separator, rest = source.partition("://")
    if not separator:
        return Source("absolute" if source.startswith("/") else "relative", source)
    if scheme == "hf" and _REPOSITORY.fullmatch(rest):
        return Source("hf", rest.removesuffix("/"))
    if scheme == "pvc" and rest.partition("/")[0]:
        claim, _, path = rest.partition("/")
        return Source("pvc", path, claim)
    if scheme == "env" and re.fullmatch(_SPLIT, rest):
        return Source("env", rest)
    if scheme == "job" and re.fullmatch(_JOB, rest):
        name, _, step = rest.partition("@")
        return Source("job", name, step=step or "last")
    if scheme in OBJECT_SCHEMES and rest.partition("/")[0]:
        return Source("object", source.rstrip("/"))
    raise UserError(f"must be {_FORMS} or a path, got {source}")


def _is_valid(holder: Any) -> bool:
    try:
        parsed = parse_source(holder.source)
    except UserError:
        return False
    return {"env": holder.MAY_BE_ENV, "job": holder.MAY_BE_JOB}.get(parsed.kind, True)


class HasSource(Spec):
    """A type with a `source`, which subclasses declare and describe."""

    MAY_BE_ENV: ClassVar[bool] = False
    """Whether an environment may be the source (env://split)."""
    MAY_BE_JOB: ClassVar[bool] = False
    """Whether the checkpoint of another job may be (job://NAME@STEP)."""
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("source",),
            f"must be {_FORMS} or a path",
            "correct the scheme",
            _is_valid,
            _SOURCE_CEL,
        ),
    )
    CLUSTER_RULES: ClassVar[tuple[ClusterRule, ...]] = (
        ClusterRule(
            "source",
            f"must be {_FORMS} or an absolute path on a cluster; `rljob run` and `submit` take others",
            "self.source.contains('://') || self.source.startsWith('/')",
        ),
    )


OF_DATA: Final = Rule(
    ("source",),
    f"must be {_FORMS}, env://split or a path",
    "correct the scheme",
    _is_valid,
    _DATA_CEL,
)
"""The rule of HasSource, where an environment may be the source."""
OF_MODEL: Final = Rule(
    ("source",),
    f"must be {_FORMS}, job://NAME@STEP or a path",
    "correct the scheme; a step is a number, last or best",
    _is_valid,
    _MODEL_CEL,
)
"""The rule of HasSource, where another job may be the source."""


class ModelSource(HasSource):
    """A checkpoint in Hugging Face format."""

    source: PathText
    """A folder in Hugging Face format. `hf://org/name`, `pvc://claim/path`, `s3://bucket/path` (also `gs://`, `az://`),
    `/path`, or a path relative to the job file (`./path`, `../path`; `rljob run` only). `rljob` also reads `org/name`,
    the address of a page of the Hub, `~` and `$HOME`. spec.model also takes
    `job://NAME@STEP`: the model of another RLJob of the namespace, or of another run of `rljob run`."""
    revision: ShortText | None = None
    """Branch, tag or commit of an hf:// source."""
    trust_remote_code: bool = False
    """Whether to run code that comes with the model."""


RESERVED_TEMPLATE_ARGUMENTS: Final = (
    "messages", "tools", "documents", "add_generation_prompt", "conversation", "conversations", "chat_template",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "bos_token", "eos_token", "unk_token", "pad_token",
)  # fmt: skip
"""Variables that RLJob or the tokenizer sets, and parameters of transformers' apply_chat_template, which would take
them in place of the template."""
MAX_TEMPLATE_CHARACTERS: Final = 65536
ChatTemplateArguments = Annotated[FreeForm, Field(max_length=64)]
"""Variables of a chat template, by name."""


def find_argument_problem(arguments: Mapping[str, Any]) -> str:
    """Return why a job cannot use these variables of a chat template; empty if it can. CEL cannot see them."""
    reserved = ", ".join(name for name in arguments if name in RESERVED_TEMPLATE_ARGUMENTS)
    return f"must not have {reserved}, which RLJob or the tokenizer sets; remove them" if reserved else ""


class ChatTemplate(Spec):
    """A chat template in place of the model's: exactly one of inline and file."""

    RULES: ClassVar[tuple[Rule, ...]] = (exactly_one("inline", "file", remedy="set one and remove the other"),)
    CLUSTER_RULES: ClassVar[tuple[ClusterRule, ...]] = (
        ClusterRule(
            "file",
            "works only with `rljob run` and `rljob submit`, which read the file; set inline",
            "!has(self.file)",
        ),
    )

    inline: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_CHARACTERS)] | None = None
    """Jinja source, as chat_template.jinja has it; at most 64 KiB."""
    file: PathText | None = None
    """Path of such a file, relative to the job file. `rljob run` and `rljob submit` read it; a cluster has no file."""


class SecretKeyRef(Spec):
    """A key of a Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: ObjectName
    """Key in the Secret. `rljob run` reads the environment variable of this name instead."""


class Hub(Spec):
    """The Hugging Face Hub that hf:// sources come from. The head, trainers, rollouts and vLLM in reward Pods use it;
    reward functions do not."""

    endpoint: Url | None = None
    """Address of a mirror, set as HF_ENDPOINT. Null: HF_ENDPOINT in a role's env (or the shell of `rljob run`), else
    https://huggingface.co."""
    token_secret_ref: SecretKeyRef | None = None
    """Access token for gated and private repositories, set as HF_TOKEN. Null: HF_TOKEN in a role's env (or the shell of
    `rljob run`), else none."""


class ObjectStorage(Spec):
    """The object storage that s3:// sources come from. The head, trainers, rollouts and vLLM in reward Pods use it;
    reward functions do not. Without secretRef, the identity of the Pods counts: that of their serviceAccountName."""

    endpoint: Url | None = None
    """Address of a storage that speaks S3's protocol, such as MinIO, set as AWS_ENDPOINT_URL_S3. Null: that
    variable, or AWS_ENDPOINT_URL, in a role's env (or the shell of `rljob run`), else AWS."""
    region: ShortText | None = None
    """Region of the buckets, set as AWS_REGION. Null: AWS_REGION in a role's env (or the shell of `rljob run`), else
    what the storage says."""
    secret_ref: LocalObjectReference | None = None
    """Secret with keys that are set as variables of the same name: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and
    AWS_SESSION_TOKEN; for az://, AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN and
    AZURE_STORAGE_CONNECTION_STRING. Other keys are not read. `rljob run` reads the shell's variables instead."""


OBJECT_VARIABLES: Final = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_CONNECTION_STRING",
)  # fmt: skip
"""Keys of ObjectStorage.secret_ref."""
