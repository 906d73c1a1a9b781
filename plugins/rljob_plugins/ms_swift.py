"""ms-swift: classes based on ORM, which get lists and the columns of the data."""

from typing import Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin

SIGNATURE: Final = SignaturePlugin(
    conventions=(
        Convention(
            "msSwift",
            "ORM.__call__(completions, **columns)",
            ("response_token_ids",),
            {
                "prompts": values.PROMPT,
                "completions": values.COMPLETION,
                "infer_requests": values.COMPLETION,
                "answer": values.GROUND_TRUTH,
                "ground_truth": values.GROUND_TRUTH,
                "ground_truths": values.GROUND_TRUTH,
                "solution": values.GROUND_TRUTH,
                "data_source": values.DATA_SOURCE,
                "prompt_ids": values.PROMPT_IDS,
                "completion_ids": values.COMPLETION_IDS,
                "response_token_ids": values.COMPLETION_IDS,
            },
            lists=True,
            returns="numbers",
            has_columns=True,
            bases=("ORM", "AsyncORM"),
            constructor_parameter="args",
        ),
    )
)
