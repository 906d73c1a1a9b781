"""Hides secrets in what others may read: logs, records, trackers, pages. Pure, and of the standard library only.

A text is a secret by the name of its variable, option or field; by its form, as the password in a URL or a key of a
known provider; or because it contains the value of a variable that is one. Invariant: nothing but secrets is changed.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

HIDDEN: Final = "(hidden)"
_SECRET_NAME = re.compile(
    r"token(?!iz)|key|secret|passw|passphrase|pwd|credential|auth|webhook|dsn|cookie|signature|connection_?string"
    r"|(?<![a-z])(?:pat|pin|cred)s?(?![a-z])",
    re.IGNORECASE,
)
_NO_SECRET_NAME = re.compile(r"(_path|_file|_dir|_sock|_mode|_url|_uri|_host|_user(name)?|^(old)?pwd)$", re.IGNORECASE)
"""Names of variables that say where a secret is, or how it is used, and the shell's working directory, PWD. What is
secret in a URL has its form."""
_SECRET_OPTION = re.compile(
    r"^-*([\w-]*[-_])?(api[-_]?key|access[-_]?key|password|passwd|secret|token|bearer)$", re.IGNORECASE
)
"""Names of options and free-form fields. `maxTokens` and `apiKeySecretRef` are none."""
_MIN_VALUE_LENGTH = 8
"""A shorter value, such as `true`, may stand anywhere."""
_WORD = re.compile(r"[A-Za-z][a-z]*(_[a-z]+)*")
"""A value such as `question`, of SORT_KEY, is no secret. One of PASSWORD may be."""
_WORD_NAME = re.compile(r"passw|pwd|secret|credential", re.IGNORECASE)
_SECRET_PARAMETER = r"(?:[\w.~-]{0,64}(?:key|token|secret|passw(?:or)?d|signature|credential|auth)|sig|pwd|code)"
_BEFORE_PARAMETER = r"(?:(?<=[?&])|(?<=&amp;)|(?<=\\u0026))"
"""Also as HTML and JSON of a page write &."""
_NO_SECRET_TOKEN = r"(?:[be]os|pad|unk|mask|stop|max|min|num)"
_WORDS = r"(?:[A-Za-z]?[a-z]+|[A-Z]+)(?:[-/._](?:[A-Za-z]?[a-z]+|[A-Z]+))*"
_FORMS = [
    re.compile(r"(?<=://)(?<!\bjob://)(?!git@)[^\s/?#@\"'<>]+(?=@)"),  # user and password of a URL
    re.compile(rf"{_BEFORE_PARAMETER}{_SECRET_PARAMETER}=(?P<secret>[^\s&#\"'<>\\]+)", re.IGNORECASE),
    re.compile(r"\b(?:Account|SharedAccess)(?:Key|Signature)=(?P<secret>[^\s;&#\"'<>\\]+)", re.IGNORECASE),  # Azure
    re.compile(r"(?<=hooks\.slack\.com/)(?:services|workflows)/(?P<secret>[^\s\"'<>]+)"),
    re.compile(r"(?<=discord\.com/api/)webhooks/(?P<secret>[^\s\"'<>]+)"),
    re.compile(r"\bCookie[\"'\\]{0,2}\s?[:=]\s?[\"'\\]{0,2}(?P<secret>\w+=[^\"'\n]+)", re.IGNORECASE),
    re.compile(
        r"\bAuthorization[\"'\\]{0,2}\s?[:=]\s?[\"'\\]{0,2}(?:\w{1,16}\s+)?(?P<secret>[A-Za-z0-9._~+/=-]{8,})",
        re.IGNORECASE,
    ),
    # Without the name of the header, words may follow: basic arithmetic, basic problem-solving.
    re.compile(rf"\b(?i:Bearer|Basic)\s+(?P<secret>(?!{_WORDS}(?![\w~+/=-]))[A-Za-z0-9._~+/=-]{{8,}})"),
    re.compile(
        rf"(?<![\w-])--(?!{_NO_SECRET_TOKEN}[_-])[\w-]{{0,64}}(?:api-key|token|password|secret)"
        r"[= ](?P<secret>[^\s\"'-][^\s\"']*)"
    ),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\w+/=\s\\]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"),
    re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}\b"),  # Hugging Face
    re.compile(r"\bsk-(?=[a-z_-]{0,64}[A-Z0-9])[A-Za-z0-9_-]{16,}"),  # OpenAI, Anthropic and others
    re.compile(r"\b(?:gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,})\b"),
    re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),  # Slack
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),  # AWS
    re.compile(r"\bAIza[\w-]{35}"),  # Google
    re.compile(r"\bnvapi-[\w-]{20,}"),  # NVIDIA
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),  # JSON Web Tokens
]
"""What is secret by its form: the group `secret`, or the whole match."""


class Redactor:
    """Hides secrets by their form, and these values wherever they stand."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = sorted({value for value in values if len(value) >= _MIN_VALUE_LENGTH}, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, known))) if known else None

    def hide(self, text: str) -> str:
        """Return the text without its secrets."""
        if self._values:
            text = self._values.sub(HIDDEN, text)
        for form in _FORMS:
            text = form.sub(_hide_match, text)
        return text

    def redact(self, value: Any) -> Any:
        """Return a manifest, or other JSON, without its secrets."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, list | tuple):
            return [self._redact_item(before, each) for before, each in zip([None, *value], value, strict=False)]
        if not isinstance(value, dict):
            return value
        return {name: self._redact_field(name, each) for name, each in value.items()}

    def _redact_item(self, before: Any, value: Any) -> Any:
        """An argument may be the value of the option before it."""
        return HIDDEN if _is_argument(before, value) else self.redact(value)

    def _redact_field(self, name: Any, value: Any) -> Any:
        if name == "env":
            return self._redact_env(value)
        return HIDDEN if _is_field(name, value) else self.redact(value)

    def _redact_env(self, env: Any) -> Any:
        """`env` maps names to values, or is a Pod's list of name and value."""
        secret = {name for name, _ in find_secrets(env)}
        if isinstance(env, dict):
            return {name: HIDDEN if name in secret else self.redact(value) for name, value in env.items()}
        if isinstance(env, list):
            return [
                each | {"value": HIDDEN}
                if isinstance(each, dict) and each.get("value") and each.get("name") in secret
                else self.redact(each)
                for each in env
            ]
        return env


def _is_argument(before: Any, value: Any) -> bool:
    return isinstance(before, str) and before.startswith("-") and _is_field(before, value)


def _is_field(name: Any, value: Any) -> bool:
    return bool(value and isinstance(value, str) and _SECRET_OPTION.match(str(name)))


def redact_job(job: Mapping[str, Any]) -> Any:
    """Return a job without its secrets."""
    return Redactor(find_values(job)).redact(dict(job))


def redact_environment(environ: Mapping[str, str]) -> Redactor:
    """Return what hides the secrets of these variables of a process, also as JSON writes them."""
    values = list(_find_rare(environ))
    return Redactor(
        [*values, *(json.dumps(each, ensure_ascii=ascii)[1:-1] for each in values for ascii in (False, True))]
    )


def find_secrets(env: Any) -> Iterator[tuple[str, str]]:
    """Yield names and values of variables whose names suggest a secret."""
    pairs: Iterable[tuple[Any, Any]] = env.items() if isinstance(env, Mapping) else ()
    if isinstance(env, list):
        pairs = [(each.get("name"), each.get("value")) for each in env if isinstance(each, dict)]
    for name, value in pairs:
        if isinstance(value, str) and value and _is_secret_name(str(name)):
            yield name, value


def _find_rare(env: Any) -> Iterator[str]:
    """Yield values of secret variables, except for what is a word of other texts, too."""
    for name, value in find_secrets(env):
        if _WORD_NAME.search(name) or not _WORD.fullmatch(value):
            yield value


def _is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET_NAME.search(name)


def find_values(value: Any) -> Iterator[str]:
    """Yield the values of all secret variables, options and fields that are secret wherever they stand."""
    if isinstance(value, dict):
        yield from _find_rare(value.get("env"))
        yield from (str(each) for name, each in value.items() if _is_field(name, each))
    elif isinstance(value, list):
        yield from (str(each) for before, each in itertools.pairwise(value) if _is_argument(before, each))
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from find_values(each)


def _hide_match(found: re.Match[str]) -> str:
    if "secret" not in found.re.groupindex:
        return HIDDEN
    start, end = found.span("secret")
    whole = found.string
    return whole[found.start() : start] + HIDDEN + whole[end : found.end()]
