"""Sandboxed Jinja templates over what a chat model may know: the question to a judge, the persona of a user.

Reports errors of a template at startup, with their line. Invariant: a missing field is an error; it is never rendered
as empty text.
"""

from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rljob_api.errors import UserError
from rljob_api.phrases import did_you_mean
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import UserCall
from rljob_api.wire.scores import ScoreRequest
from rljob_service.models.execution import NoScoreError
from rljob_service.models.texts import to_messages, to_text


class Template:
    def __init__(self, field: str, text: str, names: tuple[str, ...]) -> None:
        """`field`: its path in messages; `names`: its variables. Raises UserError if the template is invalid."""
        self._field = field
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
        try:
            parsed = environment.parse(text)
            unknown = find_undeclared_variables(parsed) - {*names, *environment.globals}
            if unknown:
                raise UserError(f"{field}:{_describe_unknown(parsed, unknown, names)}")
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            lines = text.splitlines()
            line = lines[error.lineno - 1].strip() if 0 < error.lineno <= len(lines) else ""
            raise UserError(f"{field}:{error.lineno}: {error.message}: {line}") from error
        except TemplateError as error:  # an unknown filter or test, in some versions of Jinja
            raise UserError(f"{field}: {error}") from error

    def render(self, fields: dict[str, Any]) -> str:
        """Return the text. Raises NoScoreError if the template fails on these fields."""
        try:
            return self._template.render(fields)
        except Exception as error:  # expressions over the data can raise anything
            message = f"{self._field}: {type(error).__name__}: {error}"
            raise NoScoreError(InvalidReason.EXCEPTION, message) from error


def fields_of(request: ScoreRequest | UserCall) -> dict[str, Any]:
    """Return the variables of a row: `messages` are those of its prompt."""
    return {
        "prompt": to_text(request.prompt),
        "messages": to_messages(request.prompt),
        "ground_truth": request.ground_truth,
        "data_source": request.data_source,
        "extra_info": request.extra_info,
    }


def _describe_unknown(parsed: nodes.Template, unknown: set[str], names: tuple[str, ...]) -> str:
    found = [node for node in parsed.find_all(nodes.Name) if node.name in unknown]
    first = min(found, key=lambda node: node.lineno)
    hints = filter(None, [f"known variables are {', '.join(names)}", did_you_mean(first.name, names)])
    return f"{first.lineno}: unknown variable {first.name}; {'; '.join(hints)}"
