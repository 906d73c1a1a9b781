from rljob_cluster.lifecycle.addons import COREDNS_IMAGE, build_coredns, build_volume
from rljob_cluster.node.node import DNS_ADDRESS, LABEL_POOL


def test_coredns_serves_the_address_that_kubelets_give_to_pods() -> None:
    by_kind = {manifest["kind"]: manifest for manifest in build_coredns()}
    assert by_kind["Service"]["spec"]["clusterIP"] == DNS_ADDRESS
    pod = by_kind["Deployment"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == COREDNS_IMAGE
    assert pod["nodeSelector"] == {LABEL_POOL: "system"}
    assert by_kind["ConfigMap"]["data"]["Corefile"].startswith(".:1053 {\n")


def test_volume_is_bound_to_its_claim_only() -> None:
    volume, claim = build_volume("runs", "team", "/data")
    assert volume["spec"]["claimRef"] == {"name": "runs", "namespace": "team"}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"] == "team-runs"
