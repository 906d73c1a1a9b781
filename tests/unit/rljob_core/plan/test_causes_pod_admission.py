"""What a user reads of an answer with which the API server admits no Pod: who rejects it, why, and what to do."""

import pytest

from rljob_core.plan.causes import explain_rejection

POD = 'pods "gsm8k-trainer-0" is forbidden: '


BEFORE = [POD, f"Error creating: {POD}", f"create Pod p-0 in StatefulSet p failed error: {POD}"]


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize(
    ("message", "text", "remedy"),
    [
        (
            "ValidatingAdmissionPolicy 'team' with binding 'all' denied request: set a team: label",
            "ValidatingAdmissionPolicy team rejects its Pods: set a team: label",
            "change that policy, or {path}.template",
        ),
        (
            'admission webhook "validate.kyverno.svc-fail" denied the request: resource Pod was blocked',
            "admission webhook validate.kyverno.svc-fail rejects its Pods: resource Pod was blocked",
            "change its policy, or {path}.template",
        ),
        (
            'admission webhook "w.example.com" denied the request without explanation',
            "admission webhook w.example.com rejects its Pods: it gives no reason",
            "change its policy, or {path}.template",
        ),
        (
            'violates PodSecurity "restricted:latest": unrestricted capabilities (container "trainer" must not ...)',
            'PodSecurity restricted:latest of the namespace rejects its Pods: unrestricted capabilities (container "'
            'trainer" must not ...)',
            "change {path}.template, or the namespace's label pod-security.kubernetes.io/enforce",
        ),
        (
            'error looking up service account research/gpu: serviceaccount "gpu" not found',
            "its Pods need the service account gpu, which does not exist",
            "create it, or correct spec.serviceAccountName or {path}.template",
        ),
        (
            "no PriorityClass with name high was found",
            "its Pods need the PriorityClass high, which does not exist",
            "create it, or correct spec.priorityClassName or {path}.template",
        ),
        (
            'pod rejected: RuntimeClass "zz" not found',
            "its Pods need the RuntimeClass zz, which does not exist",
            "create it, or correct spec.runtimeClassName or {path}.template",
        ),
        ("unknown words", "the API server rejects its Pods: unknown words", ""),
    ],
)
def test_rejection_says_who_rejects_the_pods_why_and_what_to_do(before, message, text, remedy):
    assert explain_rejection(before + message) == (text, remedy)


@pytest.mark.parametrize("message", ["", "pods", 'pods "x" is forbidden: ', "\n"])
def test_message_without_words_is_said_to_have_none(message):
    text, _ = explain_rejection(message)
    assert text.startswith("the API server rejects its Pods: ")
    assert text.rpartition(": ")[2]
