"""The hosts file: the addresses of a name."""

from __future__ import annotations

from rljob_cli.local.node.hosts import build_hosts


def pod(name, ip, ready=True, **metadata):
    conditions = [{"type": "Ready", "status": str(ready)}]
    status = {"phase": "Running", "podIP": ip, "conditions": conditions}
    return {"metadata": {"name": name, "labels": {"app": "a"}, **metadata}, "spec": {}, "status": status}


def service(**spec):
    return {"kind": "Service", "metadata": {"name": "s", "namespace": "ns"}, "spec": {"selector": {"app": "a"}, **spec}}


def addresses(name, *args):
    return [line.split()[0] for line in build_hosts(*args).splitlines() if name in line.split()[1:]]


def test_service_resolves_only_to_ready_pods():
    pods = [pod("p-0", "127.1.1.1"), pod("p-1", "127.1.1.2", ready=False)]
    for name in ("s", "s.ns", "s.ns.svc", "s.ns.svc.cluster.local"):
        assert addresses(name, [service()], pods) == ["127.1.1.1"]


def test_service_with_publish_not_ready_addresses_resolves_to_unready_pods():
    pods = [pod("p-0", "127.1.1.1"), pod("p-1", "127.1.1.2", ready=False)]
    assert addresses("s", [service(publishNotReadyAddresses=True)], pods) == ["127.1.1.1", "127.1.1.2"]


def test_terminating_pod_has_no_name():
    pods = [pod("p-0", "127.1.1.1", deletionTimestamp="now")]
    assert build_hosts([service(publishNotReadyAddresses=True)], pods) == ""


def test_pod_of_a_stateful_set_has_a_separate_name():
    assert addresses("p-0.s", [service()], [pod("p-0", "127.1.1.1"), pod("p-1", "127.1.1.2")]) == ["127.1.1.1"]
