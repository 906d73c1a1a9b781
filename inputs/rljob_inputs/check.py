"""Checks of a job's models and data before anything starts; what they read is what the trainer reads later.

Invariant: a check writes nothing but the Hub's cache, and answers within seconds: of large data it reads a sample.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rljob_api.manifest.job import RLJob
from rljob_inputs.findings import Finding, LengthTable
from rljob_inputs.prompts import Prompt


@dataclass
class InputsReport:
    """What is known about a job's inputs. Fields are empty or None where the inputs cannot be read."""

    findings: list[Finding] = field(default_factory=list)
    lengths: list[LengthTable] = field(default_factory=list)
    num_parameters: dict[str, int] = field(default_factory=dict)
    """Of each model, by the field of its source: spec.model.source, spec.rewards[0].model.source."""
    first_prompt: Prompt | None = None
    """The first training prompt, as a reward receives it."""


def check_inputs(
    job: RLJob, locate: Callable[[str], str | None], environment: Mapping[str, str] = os.environ
) -> InputsReport:
    """Check all models and datasets of a job.

    `locate` returns where this process finds a source: a path, or hf://org/name; None skips the source. `environment`
    may have HF_ENDPOINT and HF_TOKEN; the job's own settings take precedence.
    """
    return InputsReport()
