"""OpenRLHF's reward functions: lists of queries, prompts and labels, with special tokens."""

from typing import Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin

SIGNATURE: Final = SignaturePlugin(
    conventions=(
        Convention(
            "openrlhf",
            "reward_func(queries, prompts, labels, **kwargs)",
            ("queries",),
            {"queries": values.CONVERSATION, "prompts": values.RENDERED_PROMPT, "labels": values.GROUND_TRUTH},
            lists=True,
            read_returned="rljob_plugins.openrlhf.returns:read_rewards",
            whole=True,
        ),
    )
)
