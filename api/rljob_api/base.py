"""The base of every type in a manifest: camelCase names, unknown fields refused, docstrings as descriptions."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Spec(BaseModel):
    """A piece of a manifest. Python says `learning_rate`, YAML says `learningRate`."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
    )

    def to_manifest(self) -> dict[str, Any]:
        """Plain data as YAML would hold it: camelCase keys, nulls left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ObjectMeta(Spec):
    """The part of Kubernetes' ObjectMeta that RLJob reads. The API server fills in the rest."""

    model_config = ConfigDict(extra="allow")

    name: str
    """Name of the object: a DNS label of at most 40 characters, since children add a suffix to it."""
    namespace: str = "default"
    """Namespace of the object and of all its children."""
    labels: dict[str, str] = {}
    """Labels, copied to no child."""
    annotations: dict[str, str] = {}
    """Annotations, copied to no child."""
    uid: str = ""
    """Set by the API server; owner references carry it."""
    generation: int = 1
    """Set by the API server: counts the changes of spec."""
