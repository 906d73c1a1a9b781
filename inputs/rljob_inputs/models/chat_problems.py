"""What may go wrong between a job and its chat template: variables without an effect, answers too short to think. Pure.

Invariant: warnings alone; a template that fails is an error of the prompts that it fails for.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rljob_api.manifest.job import RLJobSpec
from rljob_api.manifest.sources import RESERVED_TEMPLATE_ARGUMENTS
from rljob_api.phrases import did_you_mean
from rljob_inputs.findings import Finding
from rljob_inputs.models.defaults import OwnSettings

_FEW_TOKENS = 1024
"""Fewer tokens seldom hold the reasoning about a question and its answer."""
_ARGUMENTS = "spec.data.chatTemplateArguments"


def find_chat_problems(spec: RLJobSpec, own: OwnSettings) -> Iterator[Finding]:
    """`spec`: as the manifest has it; `own`: of its model."""
    arguments, limit = spec.data.chat_template_arguments, spec.rollout.sampling.max_tokens
    if spec.data.format == "text":
        if arguments:
            yield Finding(_ARGUMENTS, "has no effect with data.format: text", is_warning=True)
        return
    yield from find_unread(_ARGUMENTS, arguments, own)
    if limit is not None and limit < _FEW_TOKENS and own.template and own.template.can_think(arguments):
        message = (
            f"is {limit}, but the model may think before it answers ({own.template_place}), and answers that are cut "
            f"off have no result; remove it, or switch thinking off with {_ARGUMENTS}"
        )
        yield Finding("spec.rollout.sampling.maxTokens", message, is_warning=True)


def find_unread(path: str, arguments: Mapping[str, Any], own: OwnSettings) -> Iterator[Finding]:
    """Warn about variables that the chat template does not read: it would ignore a misspelt one."""
    if own.template is None:  # the job is invalid, or needs none
        return
    variables = own.template.variables
    unknown = [name for name in arguments if name not in {*variables, *RESERVED_TEMPLATE_ARGUMENTS}]
    if unknown:
        others = sorted(variables - {*RESERVED_TEMPLATE_ARGUMENTS})
        hint = did_you_mean(unknown[0], others, f"it reads {', '.join(others) or 'none'}")
        message = f"has {', '.join(unknown)}, which the chat template ({own.template_place}) does not read; {hint}"
        yield Finding(path, message, is_warning=True)
