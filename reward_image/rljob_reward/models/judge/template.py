"""The question to a judge: a sandboxed Jinja template over the fields of a ScoreRequest or of a group.

Reports errors of the template at startup, with their line. Invariant: a missing field is an error; it is never rendered
as empty text.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rljob_api.errors import UserError
from rljob_api.wire.protocol import InvalidReason, Message, ScoreRequest
from rljob_reward.models.execution import NoScoreError
from rljob_reward.models.texts import to_messages, to_text

_FIELDS = ("prompt", "messages", "ground_truth", "data_source", "extra_info")
_FIELD_PATH = "judge.template"


class QuestionTemplate:
    def __init__(self, template: str, system_prompt: str | None, completions: tuple[str, ...]) -> None:
        """`completions`: names of the variables to be judged. Raises UserError if the template is invalid."""
        names = (*_FIELDS[:2], *completions, *_FIELDS[2:])
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
        try:
            parsed = environment.parse(template)
            unknown = find_undeclared_variables(parsed) - {*names, *environment.globals}
            if unknown:
                raise UserError(_describe_unknown(parsed, unknown, names))
            self._template = environment.from_string(template)
        except TemplateSyntaxError as error:
            lines = template.splitlines()
            line = lines[error.lineno - 1].strip() if 0 < error.lineno <= len(lines) else ""
            raise UserError(f"{_FIELD_PATH}:{error.lineno}: {error.message}: {line}") from error
        except TemplateError as error:  # an unknown filter or test, in some versions of Jinja
            raise UserError(f"{_FIELD_PATH}: {error}") from error
        self._system_prompt = system_prompt

    def build_messages(self, fields: dict[str, Any]) -> list[Message]:
        """Return the messages to send. Raises NoScoreError if the template fails on this sample."""
        try:
            text = self._template.render(fields)
        except Exception as error:  # expressions over the data can raise anything
            message = f"{_FIELD_PATH}: {type(error).__name__}: {error}"
            raise NoScoreError(InvalidReason.EXCEPTION, message) from error
        system = [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]
        return [*system, {"role": "user", "content": text}]


def fields_of(request: ScoreRequest) -> dict[str, Any]:
    """Return the variables of a sample, except its completion."""
    return {
        "prompt": to_text(request.prompt),
        "messages": to_messages(request.prompt),
        "ground_truth": request.ground_truth,
        "data_source": request.data_source,
        "extra_info": request.extra_info,
    }


def common_fields_of(requests: Sequence[ScoreRequest]) -> dict[str, Any]:
    """Return the variables of a group: its prompt, and the entries of extra_info that all samples share."""
    first, *others = requests
    shared = {
        name: value
        for name, value in first.extra_info.items()
        if all(name in other.extra_info and other.extra_info[name] == value for other in others)
    }
    return fields_of(first) | {"extra_info": shared}


def _describe_unknown(parsed: nodes.Template, unknown: set[str], names: tuple[str, ...]) -> str:
    found = [node for node in parsed.find_all(nodes.Name) if node.name in unknown]
    first = min(found, key=lambda node: node.lineno)
    near = difflib.get_close_matches(first.name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{_FIELD_PATH}:{first.lineno}: unknown variable {first.name}; known variables are {', '.join(names)}{hint}"
