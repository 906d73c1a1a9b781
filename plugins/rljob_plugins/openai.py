"""OpenAI's graders in Python: grade(sample, item)."""

from __future__ import annotations

from typing import Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin
from rljob_api.functions.values import Value

_OUTPUT: Final = Value("output_text", lambda sample: {"output_text": sample["completion"]})

SIGNATURE: Final = SignaturePlugin(
    conventions=(
        Convention("openai", "grade(sample, item)", ("sample", "item"), {"sample": _OUTPUT, "item": values.ROW}),
    )
)
