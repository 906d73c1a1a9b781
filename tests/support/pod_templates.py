"""Jobs whose Pods the API server refuses, with the field at fault; and unusual ones that it takes.

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


def probe(**fields: Any) -> dict[str, Any]:
    return own(livenessProbe=fields)


def volume(**fields: Any) -> dict[str, Any]:
    return pod(volumes=[{"name": "own", **fields}])


def node_affinity(**expression: Any) -> dict[str, Any]:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return pod(affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}})


def pod_affinity(**term: Any) -> dict[str, Any]:
    return pod(affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}})


AMD: dict[str, Any] = {"gpuResource": "amd.com/gpu"}
ENDPOINT: dict[str, Any] = {"url": "https://x", "model": "m"}
JUDGE: dict[str, Any] = {"template": "x", "parser": {"regex": "(x)"}, "endpoint": ENDPOINT}
_TEMPLATE = "spec.trainer.template.spec"
_OWN = f"{_TEMPLATE}.containers[0]"

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # (changes to the spec, path of the problem, part of its message)
    (
        resources(limits={"cpu": "1"}, requests={"cpu": "2"}),
        "spec.trainer.resources.requests.cpu",
        "at most the limit 1",
    ),
    (
        resources("head", limits={"memory": "1Gi"}, requests={"memory": "2G"}),
        "spec.head.resources.requests.memory",
        "limit",
    ),
    (resources(limits={"mem": "4Gi"}), "spec.trainer.resources.limits.mem", "did you mean memory?"),
    (resources(limits={"nvidia.com/gpu": "1.5"}), "spec.trainer.resources.limits.nvidia.com/gpu", "whole number"),
    (resources(limits={"example.com/npu": "100m"}), "spec.trainer.resources.limits.example.com/npu", "whole number"),
    (
        resources(requests={"nvidia.com/gpu": "1"}),
        "spec.trainer.resources.requests.nvidia.com/gpu",
        "needs an equal limit",
    ),
    (
        resources(requests={"nvidia.com/gpu": "1"}, limits={"nvidia.com/gpu": 2}),
        "spec.trainer.resources.requests.nvidia.com/gpu",
        "must equal the limit 2",
    ),
    (
        {"trainer": {"gpusPerReplica": 2, "nodePool": AMD, "resources": {"requests": {"amd.com/gpu": 1}}}},
        "spec.trainer.resources.requests.amd.com/gpu",
        "must equal the limit 2",
    ),
    (resources(requests={"hugepages-2Mi": "4Mi"}), "spec.trainer.resources.requests.hugepages-2Mi", "equal limit"),
    (own(resources={"limits": {"hugepages-2Mi": "4Mi"}}), f"{_OWN}.resources.limits.hugepages-2Mi", "cpu or memory"),
    (resources(limits={"_x/y": "1"}), "spec.trainer.resources.limits._x/y", "must be a name"),
    (resources(limits={"requests.cpu/x": "1"}), "spec.trainer.resources.limits.requests.cpu/x", "requests."),
    (reward(resources={"limits": {"gpu": 1}}), "spec.rewards[0].resources.limits.gpu", "nvidia.com/gpu"),
    ({"trainer": {"env": {"A=B": "1"}}}, "spec.trainer.env.A=B", "without '='"),
    ({"head": {"env": {"": "1"}}}, "spec.head.env.", "environment variable"),
    (reward(env={"NAÏVE": "1"}), "spec.rewards[0].env.NAÏVE", "environment variable"),
    (
        {"rollout": {"nodePool": {"nodeSelector": {"a b": "c"}}}},
        "spec.rollout.nodePool.nodeSelector.a b",
        "must be a name",
    ),
    ({"rollout": {"nodePool": {"nodeSelector": {"gpu": "a b"}}}}, "spec.rollout.nodePool.nodeSelector.gpu", "letters"),
    (pod(nodeSelector=["a"]), f"{_TEMPLATE}.nodeSelector", "must be a mapping"),
    (pod(nodeSelector={"gpu": True}), f"{_TEMPLATE}.nodeSelector.gpu", "put it in quotes"),
    (pod(nodeSelector={"-gpu": "x"}), f"{_TEMPLATE}.nodeSelector.-gpu", "must be a name"),
    (metadata(labels={"team!": "x"}), "spec.trainer.template.metadata.labels.team!", "must be a name"),
    (metadata(labels={"team": "my team"}), "spec.trainer.template.metadata.labels.team", "letters, digits"),
    (metadata(labels={"cost": 7}), "spec.trainer.template.metadata.labels.cost", "put it in quotes"),
    (metadata(annotations={"a/b/c": "x"}), "spec.trainer.template.metadata.annotations.a/b/c", "must be a name"),
    (metadata(lables={"a": "b"}), "spec.trainer.template.metadata.lables", "did you mean labels?"),
    (pod(restartPolicyy="Always"), f"{_TEMPLATE}.restartPolicyy", "did you mean restartPolicy?"),
    (pod(priorityClassName="High Priority"), f"{_TEMPLATE}.priorityClassName", "lower-case"),
    (pod(serviceAccountName="My_Account"), f"{_TEMPLATE}.serviceAccountName", "lower-case"),
    (pod(runtimeClassName="gVisor"), f"{_TEMPLATE}.runtimeClassName", "lower-case"),
    (pod(hostname="a.b"), f"{_TEMPLATE}.hostname", "lower-case"),
    (pod(terminationGracePeriodSeconds="60"), f"{_TEMPLATE}.terminationGracePeriodSeconds", "whole number"),
    (pod(activeDeadlineSeconds=60), f"{_TEMPLATE}.activeDeadlineSeconds", "spec.activeDeadlineSeconds"),
    (pod(dnsPolicy="Cluster"), f"{_TEMPLATE}.dnsPolicy", "one of ClusterFirst"),
    (pod(dnsPolicy="None"), f"{_TEMPLATE}.dnsPolicy", "dnsConfig.nameservers"),
    (pod(securityContext={"runAsUser": -1}), f"{_TEMPLATE}.securityContext.runAsUser", "from 0"),
    (
        pod(securityContext={"seccompProfile": {"type": "Off"}}),
        f"{_TEMPLATE}.securityContext.seccompProfile.type",
        "one of",
    ),
    (
        pod(securityContext={"seccompProfile": {"type": "Localhost"}}),
        f"{_TEMPLATE}.securityContext.seccompProfile.localhostProfile",
        "must be set",
    ),
    (pod(tolerations=[{"key": "gpu", "operator": "Exits"}]), f"{_TEMPLATE}.tolerations[0].operator", "Equal or Exists"),
    (pod(tolerations=[{"key": "gpu", "effect": "NoRun"}]), f"{_TEMPLATE}.tolerations[0].effect", "one of"),
    (pod(tolerations=[{"value": "gpu"}]), f"{_TEMPLATE}.tolerations[0].operator", "must be Exists"),
    (
        pod(tolerations=[{"key": "gpu", "operator": "Exists", "value": "x"}]),
        f"{_TEMPLATE}.tolerations[0].value",
        "must be unset",
    ),
    (
        pod(tolerations=[{"key": "gpu", "operator": "Exists", "tolerationSeconds": 3}]),
        f"{_TEMPLATE}.tolerations[0].effect",
        "NoExecute",
    ),
    (
        {"head": {"nodePool": {"tolerations": [{"key": "my taint", "operator": "Exists"}]}}},
        "spec.head.nodePool.tolerations[0].key",
        "must be a name",
    ),
    (
        {"head": {"nodePool": {"tolerations": [{"key": "gpu", "operator": "Exists", "tolerationSeconds": 3}]}}},
        "spec.head.nodePool.tolerations[0].effect",
        "NoExecute",
    ),
    (node_affinity(key="gpu", operator="in", values=["a"]), f"{_TEMPLATE}.affinity.nodeAffinity", "one of In"),
    (node_affinity(key="gpu", operator="In"), f"{_TEMPLATE}.affinity.nodeAffinity", "must have a value"),
    (node_affinity(key="gpu", operator="Exists", values=["a"]), f"{_TEMPLATE}.affinity.nodeAffinity", "must be empty"),
    (node_affinity(key="gpu", operator="Gt"), f"{_TEMPLATE}.affinity.nodeAffinity", "exactly one value"),
    (node_affinity(operator="Exists"), f"{_TEMPLATE}.affinity.nodeAffinity", "is required"),
    (pod_affinity(labelSelector={}), f"{_TEMPLATE}.affinity.podAntiAffinity", "is required"),
    (pod_affinity(topologyKey=""), f"{_TEMPLATE}.affinity.podAntiAffinity", "must be a name"),
    (
        pod_affinity(topologyKey="zone", labelSelector={"matchLabels": {"a": "b c"}}),
        f"{_TEMPLATE}.affinity.podAntiAffinity",
        "letters",
    ),
    (
        pod(topologySpreadConstraints=[{"maxSkew": 0, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]),
        f"{_TEMPLATE}.topologySpreadConstraints[0].maxSkew",
        "at least 1",
    ),
    (
        pod(topologySpreadConstraints=[{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "Never"}]),
        f"{_TEMPLATE}.topologySpreadConstraints[0].whenUnsatisfiable",
        "one of",
    ),
    (container(image=" trainer:1"), f"{_OWN}.image", "without spaces"),
    (container(image=None), f"{_OWN}.image", "set image"),
    (container(imagePullPolicy="Allways"), f"{_OWN}.imagePullPolicy", "one of Always"),
    (container(env=[None]), f"{_OWN}.env[0]", "must be a mapping with name"),
    (pod(tolerations=[None]), f"{_TEMPLATE}.tolerations[0]", "must not be empty"),
    (container(command="python"), f"{_OWN}.command", "must be a list"),
    (container(args=[1]), f"{_OWN}.args[0]", "put it in quotes"),
    (container(env=[{"name": "A", "value": 1}]), f"{_OWN}.env[0].value", "put it in quotes"),
    (container(env=[{"name": "A", "valeu": "1"}]), f"{_OWN}.env[0].valeu", "did you mean value?"),
    (
        container(env=[{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
        f"{_OWN}.env[0]",
        "value or valueFrom",
    ),
    (container(env=[{"name": "A", "valueFrom": {}}]), f"{_OWN}.env[0].valueFrom", "exactly one"),
    (
        container(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "a b"}}}]),
        f"{_OWN}.env[0].valueFrom.secretKeyRef.key",
        "letters",
    ),
    (
        container(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s"}}}]),
        f"{_OWN}.env[0].valueFrom.secretKeyRef.key",
        "is required",
    ),
    (
        container(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.node"}}}]),
        f"{_OWN}.env[0].valueFrom.fieldRef.fieldPath",
        "a field of the Pod",
    ),
    (
        {
            "rewards": [
                {
                    "name": "r",
                    "judge": JUDGE | {"endpoint": ENDPOINT | {"apiKeySecretRef": {"name": "My Key", "key": "k"}}},
                }
            ]
        },
        "spec.rewards[0].judge.endpoint.apiKeySecretRef.name",
        "lower-case",
    ),
    (container(envFrom=[{"prefix": "A"}]), f"{_OWN}.envFrom[0]", "exactly one"),
    (container(ports=[{"containerPort": 70000}]), f"{_OWN}.ports[0].containerPort", "from 1 to 65535"),
    (container(ports=[{"containerPort": 80, "name": "http_port"}]), f"{_OWN}.ports[0].name", "lower-case"),
    (container(ports=[{"containerPort": 80, "protocol": "HTTP"}]), f"{_OWN}.ports[0].protocol", "one of TCP"),
    (
        container(ports=[{"containerPort": 80, "name": "a"}, {"containerPort": 81, "name": "a"}]),
        f"{_OWN}.ports[1].name",
        "unique",
    ),
    (
        container(volumeMounts=[{"name": "cache", "mountPath": "/cache"}]),
        f"{_OWN}.volumeMounts[0].name",
        "spec.volumes",
    ),
    (
        container(volumeMounts=[{"name": "shm", "mountPath": ""}]),
        f"{_OWN}.volumeMounts[0].mountPath",
        "not be empty",
    ),
    (
        container(volumeMounts=[{"name": "shm", "mountPath": "/a", "subPath": "../b"}]),
        f"{_OWN}.volumeMounts[0].subPath",
        "relative",
    ),
    (container(resources={"limits": {"cpu": "two"}}), f"{_OWN}.resources.limits.cpu", "quantity"),
    (container(resources={"limits": {"cpu": "-1"}}), f"{_OWN}.resources.limits.cpu", "at least 0"),
    (container(resources={"limit": {"cpu": "1"}}), f"{_OWN}.resources.limit", "did you mean limits?"),
    (container(securityContext={"privileged": True}), f"{_OWN}.securityContext.allowPrivilegeEscalation", "privileged"),
    (
        container(securityContext={"capabilities": {"add": ["CAP_SYS_ADMIN"]}}),
        f"{_OWN}.securityContext.allowPrivilegeEscalation",
        "CAP_SYS_ADMIN",
    ),
    (own(name="Own_1"), f"{_OWN}.name", "lower-case"),
    (own(image=""), f"{_OWN}.image", "image"),
    (own(lifecycle={"preStop": {}}), f"{_OWN}.lifecycle.preStop", "exactly one"),
    (probe(periodSeconds=3), f"{_OWN}.livenessProbe", "exactly one"),
    (probe(httpGet={"port": 0}), f"{_OWN}.livenessProbe.httpGet.port", "from 1"),
    (probe(httpGet={"port": "my_port"}), f"{_OWN}.livenessProbe.httpGet.port", "lower-case"),
    (probe(tcpSocket={"port": 80}, successThreshold=2), f"{_OWN}.livenessProbe.successThreshold", "must be 1"),
    (probe(tcpSocket={"port": 80}, timeoutSeconds=-1), f"{_OWN}.livenessProbe.timeoutSeconds", "at least 0"),
    (volume(persistentVolumeClaim={}), f"{_TEMPLATE}.volumes[0].persistentVolumeClaim.claimName", "is required"),
    (volume(emptyDir={}, hostPath={"path": "/x"}), f"{_TEMPLATE}.volumes[0]", "one kind"),
    (volume(emptyDir={"sizeLimit": "1 Gi"}), f"{_TEMPLATE}.volumes[0].emptyDir.sizeLimit", "quantity"),
    (
        volume(persistentVolumeClaim={"claimNam": "x"}),
        f"{_TEMPLATE}.volumes[0].persistentVolumeClaim.claimNam",
        "did you mean claimName?",
    ),
    (volume(emtpyDir={}), f"{_TEMPLATE}.volumes[0].emtpyDir", "did you mean emptyDir?"),
    (pod(volumes=[{"name": "a b", "emptyDir": {}}]), f"{_TEMPLATE}.volumes[0].name", "lower-case"),
    (pod(ephemeralContainers=[{"name": "a", "image": "b"}]), f"{_TEMPLATE}.ephemeralContainers", "not allowed"),
    (
        pod(initContainers=[{"name": "trainer", "image": "x"}]),
        f"{_TEMPLATE}.initContainers[0].name",
        "unique",
    ),
    (pod(affinity={"podAffinity": []}), f"{_TEMPLATE}.affinity.podAffinity", "must be a mapping"),
    ({"scheduling": {"gang": "kueue", "queue": "my queue"}}, "spec.scheduling.queue", "letters"),
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
