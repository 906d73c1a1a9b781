"""The question to a judge: a template over the fields of a ScoreRequest or of a group, after the system message."""

from collections.abc import Sequence
from typing import Any

from rljob_api.wire.base import Message
from rljob_api.wire.scores import ScoreRequest
from rljob_service.models.templates import Template, fields_of

_FIELDS = ("prompt", "messages", "ground_truth", "data_source", "extra_info")


class QuestionTemplate:
    def __init__(self, template: str, system_prompt: str | None, completions: tuple[str, ...]) -> None:
        """`completions`: names of the variables to be judged. Raises UserError if the template is invalid."""
        self._template = Template("judge.template", template, (*_FIELDS[:2], *completions, *_FIELDS[2:]))
        self._system_prompt = system_prompt

    def build_messages(self, fields: dict[str, Any]) -> list[Message]:
        """Return the messages to send. Raises NoScoreError if the template fails on this sample."""
        text = self._template.render(fields)
        system = [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]
        return [*system, {"role": "user", "content": text}]


def common_fields_of(requests: Sequence[ScoreRequest]) -> dict[str, Any]:
    """Return the variables of a group: its prompt, and the entries of extra_info that all samples share."""
    first, *others = requests
    shared = {
        name: value
        for name, value in first.extra_info.items()
        if all(name in other.extra_info and other.extra_info[name] == value for other in others)
    }
    return fields_of(first) | {"extra_info": shared}
