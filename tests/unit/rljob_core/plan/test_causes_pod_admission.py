"""What a user reads of an answer with which the API server admits no Pod: its words, and what to do."""

import pytest

from rljob_core.plan.causes import REMEDIES, describe_rejection

POD = 'pods "gsm8k-trainer-0" is forbidden: '


@pytest.mark.parametrize(
    "before", [POD, f"Error creating: {POD}", f"create Pod p-0 in StatefulSet p failed error: {POD}"]
)
@pytest.mark.parametrize(
    "message",
    [
        "ValidatingAdmissionPolicy 'team' with binding 'all' denied request: set a team: label",
        'admission webhook "w.example.com" denied the request without explanation',
        'violates PodSecurity "restricted:latest": unrestricted capabilities (container "trainer" must not ...)',
        'error looking up service account research/gpu: serviceaccount "gpu" not found',
    ],
)
def test_rejection_has_the_message_without_the_generated_name_and_what_to_do(before, message):
    cause = describe_rejection("trainer", "spec.trainer", before + message)
    remedy = REMEDIES["FailedCreate"].format(path="spec.trainer")
    assert cause == ("FailedCreate", f"trainer: the API server rejects its Pods: {message}; {remedy}")


@pytest.mark.parametrize("message", ["", POD, "\n"])
def test_message_without_words_is_said_to_have_none(message):
    found = describe_rejection("trainer", "spec.trainer", message)
    assert found.message.startswith("trainer: the API server rejects its Pods: it gives no reason; ")
