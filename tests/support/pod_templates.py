"""Jobs whose Pods have wrong names or types, with the field at fault; and unusual ones that the API server takes.

One table for the unit tests of the checks, and for the comparison with a real API server.
"""

from typing import Any


def container(role: str = "trainer", **fields: Any) -> dict[str, Any]:
    """A change to the role's main container."""
    return {role: {"template": {"spec": {"containers": [{"name": role, **fields}]}}}}


def own(**fields: Any) -> dict[str, Any]:
    """A container that the template adds."""
    return {"trainer": {"template": {"spec": {"containers": [{"name": "own", "image": "own:1", **fields}]}}}}


def pod(**fields: Any) -> dict[str, Any]:
    return {"trainer": {"template": {"spec": fields}}}


def metadata(**fields: Any) -> dict[str, Any]:
    return {"trainer": {"template": {"metadata": fields}}}


def resources(role: str = "trainer", **fields: Any) -> dict[str, Any]:
    return {role: {"resources": fields}}


def reward(**fields: Any) -> dict[str, Any]:
    return {"rewards": [{"name": "correct", "function": {"inline": "def reward(): ..."}, **fields}]}


def volume(**fields: Any) -> dict[str, Any]:
    return pod(volumes=[{"name": "own", **fields}])


def node_affinity(**expression: Any) -> dict[str, Any]:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return pod(affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}})


def pod_affinity(**term: Any) -> dict[str, Any]:
    return pod(affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}})


AMD: dict[str, Any] = {"gpuResource": "amd.com/gpu"}
_TEMPLATE = "spec.trainer.template.spec"
_OWN = f"{_TEMPLATE}.containers[0]"

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # (changes to the spec, path of the problem, part of its message)
    (pod(nodeSelector=["a"]), f"{_TEMPLATE}.nodeSelector", "must be a mapping"),
    (pod(nodeSelector={"gpu": True}), f"{_TEMPLATE}.nodeSelector.gpu", "put it in quotes"),
    (metadata(labels={"cost": 7}), "spec.trainer.template.metadata.labels.cost", "put it in quotes"),
    (metadata(lables={"a": "b"}), "spec.trainer.template.metadata.lables", "did you mean labels?"),
    (pod(restartPolicyy="Always"), f"{_TEMPLATE}.restartPolicyy", "did you mean restartPolicy?"),
    (pod(terminationGracePeriodSeconds="60"), f"{_TEMPLATE}.terminationGracePeriodSeconds", "whole number"),
    (node_affinity(operator="Exists"), f"{_TEMPLATE}.affinity.nodeAffinity", "is required"),
    (pod_affinity(labelSelector={}), f"{_TEMPLATE}.affinity.podAntiAffinity", "is required"),
    (container(env=[None]), f"{_OWN}.env[0]", "must be a mapping with name"),
    (pod(tolerations=[None]), f"{_TEMPLATE}.tolerations[0]", "must not be empty"),
    (container(command="python"), f"{_OWN}.command", "must be a list"),
    (container(args=[1]), f"{_OWN}.args[0]", "put it in quotes"),
    (container(env=[{"name": "A", "value": 1}]), f"{_OWN}.env[0].value", "put it in quotes"),
    (container(env=[{"name": "A", "valeu": "1"}]), f"{_OWN}.env[0].valeu", "did you mean value?"),
    (
        container(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s"}}}]),
        f"{_OWN}.env[0].valueFrom.secretKeyRef.key",
        "is required",
    ),
    (container(resources={"limit": {"cpu": "1"}}), f"{_OWN}.resources.limit", "did you mean limits?"),
    (volume(persistentVolumeClaim={}), f"{_TEMPLATE}.volumes[0].persistentVolumeClaim.claimName", "is required"),
    (
        volume(persistentVolumeClaim={"claimNam": "x"}),
        f"{_TEMPLATE}.volumes[0].persistentVolumeClaim.claimNam",
        "did you mean claimName?",
    ),
    (volume(emtpyDir={}), f"{_TEMPLATE}.volumes[0].emtpyDir", "did you mean emptyDir?"),
    (pod(affinity={"podAffinity": []}), f"{_TEMPLATE}.affinity.podAffinity", "must be a mapping"),
]

ACCEPTED: list[dict[str, Any]] = [
    {},
    resources(
        limits={"cpu": 2, "memory": "4Gi", "ephemeral-storage": "1G"}, requests={"cpu": "1500m", "memory": "4e9"}
    ),
    resources(limits={"nvidia.com/gpu": "2e0", "example.com/npu": "2000m"}),
    resources(limits={"memory": "9" * 40, "cpu": "1E"}),
    resources(limits={"hugepages-2Mi": "4Mi"}),  # with the default requests of cpu and memory
    resources(limits={"cpu": "0.5"}, requests={"cpu": "500m"}),
    {"trainer": {"gpusPerReplica": 2}},
    {"trainer": {"gpusPerReplica": 2, "nodePool": AMD, "resources": {"limits": {"rdma/hca_shared_devices_a": 1}}}},
    {"trainer": {"env": {"A.B-C d": "1", "lower": "", "_": "x"}}},
    {"rollout": {"nodePool": {"nodeSelector": {"example.com/gpu": "", "zone": "a_b.c-1"}}}},
    metadata(labels={"a.b/c_d": "E", "x": ""}, annotations={"a": "any text: at all\nreally"}),
    pod(tolerations=[{"operator": "Exists"}, {"key": "a/b", "value": "c"}]),
    pod(tolerations=[{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": -5}]),
    pod(
        terminationGracePeriodSeconds=-1,
        priorityClassName="",
        dnsPolicy="Default",
        hostNetwork=False,
        ephemeralContainers=[],
    ),
    pod(
        hostAliases=[{"ip": "10.0.0.1", "hostnames": ["a.b"]}], dnsConfig={"options": [{"name": "ndots", "value": "1"}]}
    ),
    pod(runtimeClassName="gvisor", serviceAccountName="a.b", schedulerName="Any Name"),
    pod(imagePullSecrets=[{"name": "registry"}], shareProcessNamespace=True),
    pod(securityContext={"runAsUser": 0, "seccompProfile": {"type": "Localhost", "localhostProfile": "a.json"}}),
    pod(securityContext={"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}], "supplementalGroups": [7]}),
    pod(dnsPolicy="None", dnsConfig={"nameservers": ["10.0.0.10"]}),
    pod(topologySpreadConstraints=[{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]),
    node_affinity(key="a.b/c", operator="Gt", values=["3"]),
    node_affinity(key="a", operator="DoesNotExist"),
    pod_affinity(topologyKey="zone", labelSelector={"matchExpressions": [{"key": "a", "operator": "Exists"}]}),
    container(args=["a", None]),
    container(imagePullPolicy="", terminationMessagePolicy="File", tty=True, workingDir="relative"),
    container(env=[{"name": "A", "value": "", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
    container(env=[{"name": "A"}, {"name": "A", "value": "2"}, {"name": "B", "value": None}]),
    container(
        envFrom=[{"secretRef": {"name": "keys"}, "prefix": "P_"}, {"configMapRef": {"name": "c", "optional": True}}]
    ),
    container(ports=[{"containerPort": 1}, {"containerPort": 65535, "name": "a-1"}]),
    container(resources={"limits": {"cpu": 1, "memory": None}}),
    container(securityContext={"privileged": True, "allowPrivilegeEscalation": True}),
    container(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
    container(volumeMounts=[{"name": "shm", "mountPath": "relative/..", "subPath": "a..b"}]),
    own(livenessProbe={"exec": {"command": ["true"]}, "timeoutSeconds": 0, "periodSeconds": 0, "failureThreshold": 0}),
    own(readinessProbe={"grpc": {"port": 1}, "successThreshold": 3}),
    own(startupProbe={"httpGet": {"port": "http", "path": "/x", "httpHeaders": [{"name": "A", "value": "b"}]}}),
    own(lifecycle={"preStop": {"sleep": {"seconds": 1}}, "postStart": {"exec": {"command": ["x"]}}}),
    own(resources={}, args=[], env=[], stdin=False),
    volume(),
    volume(
        ephemeral={
            "volumeClaimTemplate": {
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
            }
        }
    ),
    volume(emptyDir={"medium": "Memory", "sizeLimit": 1000}),
    volume(nfs={"server": "a", "path": "/b"}),
    volume(csi={"driver": "secrets.example.com", "volumeAttributes": {"a": "b"}}),
    volume(projected={"sources": [{"secret": {"name": "s", "items": [{"key": "a", "path": "b"}]}}]}),
    pod(initContainers=[{"name": "fetch", "image": "x", "restartPolicy": "Always"}]),
    pod(overhead=None, affinity=None),
    {"scheduling": {"gang": "kueue", "queue": "main"}},
    reward(template={"spec": {"containers": [{"name": "reward", "env": None}]}}),
]
