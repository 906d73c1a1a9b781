"""Which ends of Pods and containers are not their own failure: evictions, lost nodes, refusals by the node, a signal.

Reads Pods and decides nothing. What is not known to be the cluster's doing counts as a failure, so a new reason is
noticed. The tests name the source of each reason.
"""

from rljob_api import foreign_texts
from rljob_api.wire.contract import ExitCode
from rljob_core.backend import Manifest
from rljob_core.children.common import DISRUPTION_CONDITIONS
from rljob_core.children.pods import VLLM_CONTAINER
from rljob_core.plan.observed_job import find_condition, has_condition

_POD_REASONS = frozenset(
    {
        # Killed by the kubelet or the node controller.
        "Evicted", "NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated",
        # Refused by the kubelet, because the node changed after the scheduler had chosen it.
        "InvalidNodeInfo", "NodeAffinity", "NodeName", "NodePorts", "TaintToleration", "TopologyAffinityError",
        "UnexpectedAdmissionError", "UnexpectedPredicateFailureType", "UnknownReason",
    }
)  # fmt: skip
"""Values of status.reason of a Pod that failed before, or without, a failure of its containers."""
_NO_RESOURCES_PREFIX = "OutOf"
"""Prefix of status.reason: OutOfcpu, OutOfmemory, OutOfpods, OutOfnvidia.com/gpu."""
_EXIT_OF_SIGTERM = 128 + 15
_CONTAINER_REASONS = ("ContainerStatusUnknown", "Unknown")
"""Reasons of a container whose end was not observed, as when its node rebooted: set by the kubelet and by
containerd."""


def find_disruption(pod: Manifest) -> str:
    """Who ended the Pod, or is about to: 'EvictionByEvictionAPI', 'OutOfcpu'. Empty: only its containers."""
    status = pod.get("status") or {}
    reason = str(status.get("reason") or "")
    if exceeded_own_limit(pod):
        return ""
    for type_ in DISRUPTION_CONDITIONS:
        if has_condition(pod, type_):
            return str(find_condition(pod, type_).get("reason") or type_)
    is_disrupted = reason in _POD_REASONS or reason.startswith(_NO_RESOURCES_PREFIX)
    return reason if status.get("phase") == "Failed" and is_disrupted else ""


def exceeded_own_limit(pod: Manifest) -> str:
    """The kubelet's message, if it evicted the Pod because that used more disk than its limits allow; else empty."""
    status = pod.get("status") or {}
    message = str(status.get("message") or "")
    return message.strip() if status.get("reason") == "Evicted" and foreign_texts.OVER_OWN_DISK.search(message) else ""


def is_lost(termination: Manifest) -> bool:
    """Whether the end of the container was not observed."""
    return termination.get("reason") in _CONTAINER_REASONS


def was_told_to_end(termination: Manifest, container: str) -> bool:
    """Whether a program that serves until it is terminated got SIGTERM. RLJob's own exit with 0 then, and at no other
    time. vLLM's does so, too, when its engine has died. A probe that failed ends as SIGKILL if the program hangs."""
    code = termination.get("exitCode")
    return code == _EXIT_OF_SIGTERM or (code == int(ExitCode.SUCCEEDED) and container != VLLM_CONTAINER)
