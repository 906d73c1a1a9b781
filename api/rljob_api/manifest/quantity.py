"""Types of quantities in a manifest: text that Kubernetes reads, and sizes, which RLJob reads as bytes."""

from typing import Annotated, Any, Self

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from rljob_api.manifest.base import QUANTITY_PATTERN, Rule, yaml_fields
from rljob_api.quantity import parse_quantity


def _integer_to_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


Quantity = Annotated[
    str,
    BeforeValidator(_integer_to_text),
    Field(pattern=QUANTITY_PATTERN, max_length=64),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "description": "A Kubernetes quantity: 500m, 2, 16Gi.",
            "maxLength": 64,
            "pattern": QUANTITY_PATTERN,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
"""An integer or a string in YAML; a string in Python."""


class Size(str):
    """A quantity of bytes, such as 2Gi, as the user wrote it."""

    num_bytes: int
    """Its value; a fraction of a byte is dropped."""

    def __new__(cls, text: str) -> Self:
        """Raises ValueError if the text is not a quantity."""
        number = parse_quantity(text)
        if number is None:
            raise ValueError("must be a Kubernetes quantity such as 2Gi")
        size = super().__new__(cls, text)
        size.num_bytes = int(number)
        return size

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: pydantic.GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(Annotated[Quantity, AfterValidator(cls)])


def size_within(field: str, least: str, most: str = "", *, may_be_zero: bool = False) -> Rule:
    """Return the rule that the Size in `field` (camelCase) has these bounds."""
    minimum, maximum = Size(least).num_bytes, Size(most).num_bytes if most else None

    def holds(model: Any) -> bool:
        size = getattr(model, yaml_fields(type(model))[field][0]).num_bytes
        return (may_be_zero and size == 0) or (size >= minimum and (maximum is None or size <= maximum))

    value = f"quantity(string(self.{field}))"
    bounds = f"{value}.compareTo(quantity('{least}')) >= 0"
    bounds += f" && {value}.compareTo(quantity('{most}')) <= 0" if most else ""
    bounds += f" || {value}.compareTo(quantity('0')) == 0" if may_be_zero else ""
    allowed = f"{'0 or ' if may_be_zero else ''}at least {least}{f' and at most {most}' if most else ''}"
    return Rule(
        (field,),
        f"must be {allowed}",
        f"write the unit, as in {least}",
        holds,
        f"!has(self.{field}) || {bounds}",
    )
