"""Ends of Pods and containers that are not their own failure, each with the source of its reason."""

import pytest

from rljob_core.plan.observed_job import find_disruption, is_lost

DISRUPTION_TARGET = {
    # pkg/scheduler/framework/preemption/executor.go; core/v1 types.go: PodReasonPreemptionByScheduler
    "PreemptionByScheduler",
    # pkg/controller/tainteviction/taint_eviction.go
    "DeletionByTaintManager",
    # pkg/controller/devicetainteviction/device_taint_eviction.go (1.33 and later)
    "DeletionByDeviceTaintManager",
    # pkg/registry/core/pod/storage/eviction.go
    "EvictionByEvictionAPI",
    # pkg/controller/podgc/gc_controller.go
    "DeletionByPodGC",
    # core/v1 types.go: PodReasonTerminationByKubelet (node pressure, graceful node shutdown, critical Pods)
    "TerminationByKubelet",
    # of a later version: the type of the condition decides
    "SomethingNewIn138",
}
"""Reasons of the condition DisruptionTarget, from kubernetes/kubernetes."""

TERMINATION_TARGET = {
    # kueue pkg/controller/jobframework/interface.go: StopReason
    "WorkloadDeleted",
    "NoMatchingWorkload",
    "NotAdmitted",
    # kueue pkg/controller/jobframework/reconciler.go: WorkloadEvictedDueTo and the reason of the workload's condition
    # Evicted, from apis/kueue/v1beta1/workload_types.go
    "WorkloadEvictedDueToPreempted",
    "WorkloadEvictedDueToPodsReadyTimeout",
    "WorkloadEvictedDueToAdmissionCheck",
    "WorkloadEvictedDueToClusterQueueStopped",
    "WorkloadEvictedDueToLocalQueueStopped",
    "WorkloadEvictedDueToNodeFailures",
    "WorkloadEvictedDueToWorkloadSliceReplaced",
    "WorkloadEvictedDueToDeactivated",
    "WorkloadEvictedDueToInactiveWorkload",
}
"""Reasons of the condition TerminationTarget, which kueue pkg/controller/jobs/pod/pod_controller.go sets (Stop)."""

STATUS_REASONS = {
    # pkg/kubelet/eviction/eviction_manager.go, helpers.go: Reason
    "Evicted",
    # pkg/util/node: NodeUnreachablePodReason
    "NodeLost",
    # pkg/kubelet/nodeshutdown: a Pod that ran, one that was refused, and the reason of 1.21
    "Terminated",
    "NodeShutdown",
    "Shutdown",
    # pkg/kubelet/events: PreemptContainer, set by pkg/kubelet/preemption/preemption.go for a critical Pod
    "Preempting",
    # pkg/kubelet/lifecycle/predicate.go
    "UnexpectedAdmissionError",
    "InvalidNodeInfo",
    "UnknownReason",
    "UnexpectedPredicateFailureType",
    "OutOfcpu",
    "OutOfmemory",
    "OutOfephemeral-storage",
    "OutOfpods",
    "OutOfnvidia.com/gpu",
    # the same file: names of the scheduler's plugins that the kubelet repeats
    "NodeAffinity",
    "NodeName",
    "NodePorts",
    "TaintToleration",
    # pkg/kubelet/cm/topologymanager: ErrorTopologyAffinity
    "TopologyAffinityError",
}
"""Values of status.reason of a failed Pod, from kubernetes/kubernetes."""


def pod(phase="Running", conditions=(), **status):
    found = [{"type": type_, "status": holds, "reason": reason} for type_, holds, reason in conditions]
    return {"metadata": {"name": "p"}, "status": {"phase": phase, "conditions": found} | status}


@pytest.mark.parametrize("phase", ["Running", "Failed"])
@pytest.mark.parametrize(
    ("type_", "reason"),
    [("DisruptionTarget", reason) for reason in sorted(DISRUPTION_TARGET)]
    + [("TerminationTarget", reason) for reason in sorted(TERMINATION_TARGET)],
)
def test_pod_with_a_disruption_condition_is_disrupted_by_its_reason(type_, reason, phase):
    assert find_disruption(pod(phase, [(type_, "True", reason)])) == reason
    assert find_disruption(pod(phase, [(type_, "True", None)])) == type_
    assert find_disruption(pod(phase, [(type_, "False", reason)])) == "", "the disruption was given up"


@pytest.mark.parametrize("reason", sorted(STATUS_REASONS))
def test_failed_pod_is_disrupted_for_each_reason_of_the_kubelet(reason):
    assert find_disruption(pod("Failed", reason=reason)) == reason


@pytest.mark.parametrize(
    "reason",
    [
        "",
        "DeadlineExceeded",  # activeDeadlineSeconds of the user's template
        # What the user's template asks for and no node grants: each replacement would be refused, too.
        "SysctlForbidden",
        "AppArmor",
        "PodOSNotSupported",
        "InitContainerRestartPolicyForbidden",
        "SupplementalGroupsPolicyNotSupported",
    ],
)
def test_failed_pod_is_not_disrupted_for_its_own_reasons(reason):
    assert find_disruption(pod("Failed", reason=reason)) == ""


@pytest.mark.parametrize(
    ("message", "is_disrupted"),
    [
        # pkg/kubelet/eviction/helpers.go
        ("The node was low on resource: memory. Container head was using 9Gi, which exceeds its request of 0. ", True),
        ("The node had condition: [DiskPressure]. ", True),
        ("Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ", False),
        ('Container head exceeded its local ephemeral storage limit "1Gi". ', False),
        ('Usage of EmptyDir volume "dshm" exceeds the limit "1Gi". ', False),
    ],
)
def test_pod_that_exceeds_its_own_disk_limit_is_not_disrupted(message, is_disrupted):
    evicted = pod("Failed", [("DisruptionTarget", "True", "TerminationByKubelet")], reason="Evicted", message=message)
    assert bool(find_disruption(evicted)) == is_disrupted
    assert find_disruption(evicted | {"status": evicted["status"] | {"reason": "Preempting"}}), "not an eviction"


@pytest.mark.parametrize(
    ("reason", "code", "lost"),
    [
        # pkg/kubelet/container/runtime.go: ContainerReasonStatusUnknown, set by pkg/kubelet/kubelet_pods.go
        ("ContainerStatusUnknown", 137, True),
        # containerd internal/cri/server/restart.go: unknownExitReason, after a reboot of the node
        ("Unknown", 255, True),
        ("OOMKilled", 137, False),
        ("Error", 255, False),
        ("Error", 137, False),
        ("StartError", 128, False),
        ("Completed", 0, False),
    ],
)
def test_container_is_lost_if_its_end_was_not_observed(reason, code, lost):
    assert is_lost({"reason": reason, "exitCode": code}) == lost
