"""The question to a judge: a Jinja template in a sandbox, over the fields of a ScoreRequest, or those of a group.

Owns the errors of a template: at the start, each with its line. Invariant: a field that is not there is an error, never
an empty place in the question.
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
from rljob_reward.models.model_slots import NoScoreError
from rljob_reward.models.texts import text_of, turns_of

_FIELDS = ("prompt", "messages", "ground_truth", "data_source", "extra_info")
_PLACE = "judge.template"


class Question:
    """A template, ready to be filled in."""

    def __init__(self, template: str, system_prompt: str | None, completions: tuple[str, ...]) -> None:
        """`completions`: the names of what is to be judged. UserError says in which line what is wrong."""
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
            raise UserError(f"{_PLACE}:{error.lineno}: {error.message}: {line}") from error
        except TemplateError as error:  # a filter or test that does not exist, in some versions
            raise UserError(f"{_PLACE}: {error}") from error
        self._system_prompt = system_prompt

    def build_messages(self, fields: dict[str, Any]) -> list[Message]:
        """The conversation that the judge is sent. NoScoreError where the template fails on this sample."""
        try:
            text = self._template.render(fields)
        except Exception as error:  # a template may do arithmetic, and more, with what the data has
            message = f"{_PLACE}: {type(error).__name__}: {error}"
            raise NoScoreError(InvalidReason.EXCEPTION, message) from error
        system = [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]
        return [*system, {"role": "user", "content": text}]


def fields_of(request: ScoreRequest) -> dict[str, Any]:
    """What a template has of a sample, its completion left out."""
    return {
        "prompt": text_of(request.prompt),
        "messages": turns_of(request.prompt),
        "ground_truth": request.ground_truth,
        "data_source": request.data_source,
        "extra_info": request.extra_info,
    }


def common_fields_of(requests: Sequence[ScoreRequest]) -> dict[str, Any]:
    """What a template has of a group: its prompt, and of extra_info what is the same for all."""
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
    return f"{_PLACE}:{first.lineno}: there is no {first.name}; there are {', '.join(names)}{hint}"
