"""Trinity-RFT: classes based on RewardFn, which return a dict whose numbers are summed."""

from __future__ import annotations

from typing import Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin

SIGNATURE: Final = SignaturePlugin(
    conventions=(
        Convention(
            "trinityRft",
            "RewardFn.__call__(response, prompt, truth)",
            ("response", "truth"),
            {"response": values.COMPLETION, "prompt": values.PROMPT_TEXT, "truth": values.GROUND_TRUTH},
            rank=400,
            returns="sum",
            bases=("RewardFn",),
        ),
    )
)
