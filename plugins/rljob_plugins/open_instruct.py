"""open-instruct: verifier functions, and classes based on VerifierFunction with a config."""

from __future__ import annotations

from typing import Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin

SIGNATURE: Final = SignaturePlugin(
    conventions=(
        Convention(
            "openInstruct",
            "verifier(tokenized_prediction, prediction, label, query)",
            ("prediction", "label"),
            {
                "tokenized_prediction": values.COMPLETION_IDS,
                "prediction": values.COMPLETION,
                "label": values.GROUND_TRUTH,
                "query": values.PROMPT_TEXT,
            },
            whole=True,
            bases=("VerifierFunction",),
            constructor_parameter="verifier_config",
            options_class="get_config_class",
        ),
    )
)
