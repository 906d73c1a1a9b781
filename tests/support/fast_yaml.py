"""YAML with libyaml: the CRDs take a second to read without it."""

from __future__ import annotations

from typing import Any

import yaml


def load(text: str) -> Any:
    return yaml.load(text, yaml.CSafeLoader)


def load_all(text: str) -> list[Any]:
    """Return the documents that are not empty."""
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]
