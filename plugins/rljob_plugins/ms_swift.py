"""ms-swift: classes based on ORM, which get lists and the columns of the data."""

from collections.abc import Sequence
from typing import Any, Final

from rljob_api.functions import values
from rljob_api.functions.conventions import Convention, SignaturePlugin
from rljob_api.functions.values import Sample, Value


def _read_rows(samples: Sequence[Sample]) -> dict[str, list[dict[str, Any]]]:
    """Return the row of each request, by its id, with the conversation as its messages."""
    return {sample["id"]: [_read_row(sample)] for sample in samples}


def _read_row(sample: Sample) -> dict[str, Any]:
    extra, prompt = values.read_extra_info(sample), sample["prompt"]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = extra.get("messages") or [*asked, {"role": "assistant", "content": sample["completion"]}]
    answer = {sample.get("answer_column") or "solution": sample.get("ground_truth")}
    return {**answer, **extra, "messages": messages, "request_id": sample["id"]}


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
                "trainer_state": values.TRAINER_STATE,
                "request_id": Value("request_id", lambda sample: sample["id"]),
                "trajectory_inputs": Value("rows", lambda sample: _read_rows([sample]), read_all=_read_rows),
            },
            lists=True,
            returns="numbers",
            has_columns=True,
            bases=("ORM", "AsyncORM"),
            constructor_parameter="args",
        ),
    )
)
