"""AReaL: reward functions of one sample, whose parameter `completions` is a string."""

from __future__ import annotations

from typing import Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin

SIGNATURE: Final = SignaturePlugin(
    conventions=(
        Convention(
            "areal",
            "reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **columns)",
            ("prompt", "completions"),
            {
                "prompt": values.PROMPT_TEXT,
                "completions": values.COMPLETION,
                "prompt_ids": values.PROMPT_IDS,
                "completion_ids": values.COMPLETION_IDS,
                "answer": values.GROUND_TRUTH,
            },
            rank=200,
            has_columns=True,
        ),
    )
)
