"""The chart's template policy on a real API server: what each mode refuses, for which author, with which message.

Three renderings of the chart are installed, each for the namespaces with its label: `deny` and `warn` have the default
values, `allow` allows everything by name.
"""

from __future__ import annotations

import copy
import json
import subprocess

import pytest
import yaml
from kubernetes import client, config

from rljob_api import API_VERSION
from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_cluster.host.commands import ClusterError
from rljob_cluster.host.go_programs import find_or_build
from tests.paths import ROOT
from tests.support.waiting import wait_for

CHART = ROOT / "charts" / "rljob"
PODS_AUTHOR, JOBS_AUTHOR = "creates-pods", "creates-jobs"
ALLOW = {
    "privileged": True,
    "root": True,
    "capabilities": ["SYS_ADMIN"],
    "hostNamespaces": True,
    "volumes": ["hostPath"],
    "nodeName": True,
    "priorityClasses": ["system-node-critical"],
    "sysctls": ["net.core.somaxconn"],
    "annotations": ["k8s.v1.cni.cncf.io/networks", "vault.hashicorp.com/*", "container.apparmor.*"],
    "csiDrivers": ["secrets-store.csi.k8s.io", "d"],
    "serviceAccounts": ["trusted"],
    "serviceAccountTokens": True,
    "secrets": ["key"],
}
ROLES = yaml.safe_load("""
- {groups: [rljob.dev], resources: [rljobs, rewardmodels], user: creates-jobs}
- {groups: [rljob.dev, ""], resources: [rljobs, rewardmodels, pods], user: creates-pods}
""")
HEAD = "spec.head.template.spec"
CONTAINER = f"{HEAD}.containers[0]"


def pod(**fields):
    """A job whose head's template has these fields of a PodSpec."""
    return {"head": {"template": {"spec": fields}}}


def container(**fields):
    return pod(containers=[{"name": "head"} | fields])


def secure(**fields):
    return container(securityContext=fields)


def volume(**source):
    return pod(volumes=[{"name": "more"} | source])


def annotated(annotations):
    return {"head": {"template": {"metadata": {"annotations": annotations}}}}


TEACHER = {"url": "https://teacher.example.com/v1", "model": "m"}


def judge(**endpoint):
    endpoint = {"url": "https://judge.example.com/v1", "model": "m"} | endpoint
    reward = {"template": "{{ completion }}", "parser": {"regex": "([0-9])"}, "endpoint": endpoint}
    return {"rewards": [{"name": "j", "judge": reward}]}


def agent(user=None, tool=None):
    """A job whose simulated user and tool have these PodSpecs."""
    function = {"function": {"inline": "x"}}
    user = function | {"template": {"spec": user or {}}}
    tools = [{"name": "plain"} | function, {"name": "own", "template": {"spec": tool or {}}} | function]
    return {"agent": {"type": "loop", "user": user, "tools": tools}}


def model_user(**endpoint):
    """A job whose user is a chat model at this endpoint."""
    endpoint = {"url": "https://user.example.com/v1", "model": "m"} | endpoint
    return {"agent": {"type": "loop", "user": {"model": {"endpoint": endpoint, "persona": "x"}}}}


def other_model(**fields):
    """A job whose program calls this model, too."""
    models = [{"name": "other", "url": "https://other.example.com/v1"} | fields]
    return {"agent": {"type": "program", "runner": {"command": ["agent"]}, "models": models}, "rewards": []}


def runner(spec):
    """A job without rewards, whose runner has this PodSpec."""
    agent = {"type": "program", "runner": {"command": ["agent"], "template": {"spec": spec}}}
    return {"agent": agent, "rewards": []}


APPARMOR = "container.apparmor.security.beta.kubernetes.io"
SECURITY = f"{CONTAINER}.securityContext"
REFUSED_FOR_ALL = [
    (secure(privileged=True), f"privileged ({SECURITY}.privileged)"),
    (secure(allowPrivilegeEscalation=True), f"privileged ({SECURITY}.allowPrivilegeEscalation)"),
    (secure(allowPrivilegeEscalation=None), f"privileged ({SECURITY}.allowPrivilegeEscalation)"),
    (secure(procMount="Unmasked"), f"privileged ({SECURITY}.procMount)"),
    (secure(seccompProfile={"type": "Unconfined"}), f"privileged ({SECURITY}.seccompProfile)"),
    (secure(appArmorProfile={"type": "Unconfined"}), f"privileged ({SECURITY}.appArmorProfile)"),
    (secure(seLinuxOptions={"type": "spc_t"}), f"privileged ({SECURITY}.seLinuxOptions)"),
    (
        pod(securityContext={"seLinuxOptions": {"user": "system_u"}}),
        f"privileged ({HEAD}.securityContext.seLinuxOptions)",
    ),
    (
        {"head": {"template": {"metadata": {"annotations": {f"{APPARMOR}/head": "unconfined"}}}}},
        "privileged (spec.head.template.metadata.annotations)",
    ),
    (pod(securityContext={"windowsOptions": {"hostProcess": True}}), f"privileged ({HEAD}.securityContext.windowsO"),
    (pod(securityContext={"seccompProfile": None}), f"privileged ({HEAD}.securityContext.seccompProfile)"),
    (secure(runAsUser=0), f"root ({SECURITY}.runAsUser)"),
    (pod(securityContext={"runAsNonRoot": False}), f"root ({HEAD}.securityContext.runAsNonRoot)"),
    (pod(securityContext=None), f"root ({HEAD}.securityContext)"),
    (secure(capabilities={"add": ["SYS_ADMIN"]}), f"capabilities ({SECURITY}.capabilities.add)"),
    (pod(initContainers=[{"name": "x", "securityContext": {"privileged": True}}]), f"({HEAD}.initContainers[0].secu"),
    (pod(hostNetwork=True), f"hostNamespaces ({HEAD}.hostNetwork)"),
    (agent(user={"hostNetwork": True}), "hostNamespaces (spec.agent.user.template.spec.hostNetwork)"),
    (agent(tool={"hostPID": True}), "hostNamespaces (spec.agent.tools[1].template.spec.hostPID)"),
    (runner({"hostPID": True}), "hostNamespaces (spec.agent.runner.template.spec.hostPID)"),
    (pod(hostPID=True), f"hostNamespaces ({HEAD}.hostPID)"),
    (pod(hostIPC=True), f"hostNamespaces ({HEAD}.hostIPC)"),
    (container(ports=[{"containerPort": 1, "hostPort": 1}]), f"hostNamespaces ({CONTAINER}.ports: hostPort)"),
    (
        container(livenessProbe={"httpGet": {"host": "169.254.169.254", "port": 80}}),
        f"hostNamespaces ({CONTAINER}: host of a probe or hook)",
    ),
    (
        container(lifecycle={"postStart": {"tcpSocket": {"host": "10.0.0.1", "port": 80}}}),
        f"hostNamespaces ({CONTAINER}: host of a probe or hook)",
    ),
    (volume(hostPath={"path": "/"}), f"volumes ({HEAD}.volumes[0]: hostPath)"),
    (volume(nfs={"server": "s", "path": "/"}), f"volumes ({HEAD}.volumes[0]: nfs)"),
    (pod(nodeName="control-plane"), f"nodeName ({HEAD}.nodeName)"),
    (pod(priorityClassName="system-node-critical"), f"priorityClasses ({HEAD}.priorityClassName)"),
    (
        pod(securityContext={"sysctls": [{"name": "net.core.somaxconn", "value": "9"}]}),
        f"sysctls ({HEAD}.securityContext.sysctls)",
    ),
    (
        {"rollout": {"template": {"metadata": {"labels": {"rljob.dev/reward-model": "other"}}}}},
        "labels (spec.rollout.template.metadata.labels)",
    ),
    (
        {"trainer": {"template": {"metadata": {"labels": {"app.kubernetes.io/name": "rljob-operator"}}}}},
        "labels (spec.trainer.template.metadata.labels)",
    ),
]
"""What an RLJob's spec has besides the smallest one, and what the message contains."""
REFUSED_WITHOUT_PODS = [
    *(
        (annotated({name: "x"}), f"annotations (spec.head.template.metadata.annotations: {name})")
        for name in ("k8s.v1.cni.cncf.io/networks", "vault.hashicorp.com/role")
    ),
    (
        volume(csi={"driver": "secrets-store.csi.k8s.io"}),
        f"csiDrivers ({HEAD}.volumes[0].csi: secrets-store.csi.k8s.io)",
    ),
    (pod(serviceAccountName="trusted"), f"serviceAccounts ({HEAD}.serviceAccountName: trusted)"),
    (pod(serviceAccount="trusted"), f"serviceAccounts ({HEAD}.serviceAccount: trusted)"),
    (pod(automountServiceAccountToken=True), f"serviceAccountTokens ({HEAD}.automountServiceAccountToken)"),
    (pod(automountServiceAccountToken=None), f"serviceAccountTokens ({HEAD}.automountServiceAccountToken)"),
    (
        volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}),
        f"serviceAccountTokens ({HEAD}.volumes[0].projected.sources[0])",
    ),
    (
        container(env=[{"name": "K", "valueFrom": {"secretKeyRef": {"name": "key", "key": "k"}}}]),
        f"secrets ({CONTAINER}.env[0]: key)",
    ),
    (container(envFrom=[{"secretRef": {"name": "key"}}]), f"secrets ({CONTAINER}.envFrom[0]: key)"),
    (
        agent(tool={"containers": [{"name": "agent", "envFrom": [{"secretRef": {"name": "key"}}]}]}),
        "secrets (spec.agent.tools[1].template.spec.containers[0].envFrom[0]: key)",
    ),
    (volume(secret={"secretName": "key"}), f"secrets ({HEAD}.volumes[0].secret: key)"),
    (
        volume(projected={"sources": [{"secret": {"name": "key"}}]}),
        f"secrets ({HEAD}.volumes[0].projected.sources[0].secret: key)",
    ),
    (
        volume(csi={"driver": "d", "nodePublishSecretRef": {"name": "key"}}),
        f"secrets ({HEAD}.volumes[0].csi.nodePublishSecretRef: key)",
    ),
    (
        judge(apiKeySecretRef={"name": "key", "key": "k"}),
        "secrets (spec.rewards[0].judge.endpoint.apiKeySecretRef: key)",
    ),
    (
        {
            "rewards": [
                {"name": "t", "teacher": {"endpoint": TEACHER | {"apiKeySecretRef": {"name": "key", "key": "k"}}}}
            ]
        },
        "secrets (spec.rewards[0].teacher.endpoint.apiKeySecretRef: key)",
    ),
    ({"hub": {"tokenSecretRef": {"name": "key", "key": "k"}}}, "secrets (spec.hub.tokenSecretRef: key)"),
    ({"objectStorage": {"secretRef": {"name": "key"}}}, "secrets (spec.objectStorage.secretRef: key)"),
    (
        {"tracing": {"endpoint": "http://collector:4318", "headersSecretRef": {"name": "key", "key": "k"}}},
        "secrets (spec.tracing.headersSecretRef: key)",
    ),
    (
        model_user(apiKeySecretRef={"name": "key", "key": "k"}),
        "secrets (spec.agent.user.model.endpoint.apiKeySecretRef: key)",
    ),
    (
        other_model(apiKeySecretRef={"name": "key", "key": "k"}),
        "secrets (spec.agent.models[0].apiKeySecretRef: key)",
    ),
]
ALLOWED = [
    {},
    judge(),
    model_user(),
    other_model(),
    agent(user={"nodeSelector": {"a": "b"}}),
    runner({"nodeSelector": {"a": "b"}}),
    secure(readOnlyRootFilesystem=True, capabilities={"drop": ["ALL"]}, runAsUser=2000, seccompProfile={"type": "x"}),
    secure(seLinuxOptions={"level": "s0:c1,c2", "type": "container_t"}),
    annotated({}),
    pod(securityContext={"sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}]}),
    pod(serviceAccountName="default", nodeSelector={"a": "b"}, priorityClassName="high", schedulerName="other"),
    pod(tolerations=[{"operator": "Exists"}], runtimeClassName="gvisor", imagePullSecrets=[{"name": "registry"}]),
    pod(volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "persistentVolumeClaim": {"claimName": "c"}}]),
    volume(projected={"sources": [{"configMap": {"name": "c"}}, {"downwardAPI": {}}]}),
    container(
        env=[{"name": "A", "value": "b"}], ports=[{"containerPort": 9}], envFrom=[{"configMapRef": {"name": "c"}}]
    ),
    container(readinessProbe={"httpGet": {"port": 9}, "periodSeconds": 3}, lifecycle={"preStop": {"sleep": {}}}),
    {"head": {"template": {"metadata": {"labels": {"app.kubernetes.io/name": "mine", "team": "rl"}}}}},
]
MALFORMED = [
    *(pod(containers=value, volumes=value, securityContext=value) for value in ("text", 1, [1], {"a": 1}, ["x"])),
    *(secure(**{name: value}) for name in ("capabilities", "runAsUser", "seccompProfile") for value in (1, [], "x")),
    *(pod(priorityClassName=value, serviceAccountName=value) for value in (1, None, {}, [])),
    *(container(env=value, envFrom=value, ports=value) for value in ("x", [1], [{"valueFrom": 1}], {"a": 1}, None)),
    *(volume(projected=value, secret=value, csi=value) for value in (1, None, {"sources": 1}, {"sources": [1]})),
    *(container(lifecycle=value, livenessProbe=value) for value in (1, None, [], {"httpGet": 1}, {"preStop": []})),
    *({"head": {"template": {"spec": value, "metadata": value}}} for value in (None, 1, "x", [])),
    *(annotated(value) for value in (None, 1, [1])),
    *(pod(securityContext={"sysctls": value}) for value in (None, 1, {"a": 1})),
    *({"head": {"template": {"metadata": {"labels": value}}}} for value in (None, 1, {"a": 1}, {"rljob": None})),
    volume(secret={"secretName": 1}),
]
"""What Kubernetes' schema refuses: the operator names the field, so the policy must not fail on it."""


@pytest.fixture(scope="module")
def plane(tmp_path_factory, loopback):
    """An API server as the oldest supported one, and the controller that checks the types in policies."""
    only = {
        "kube-controller-manager": ["--controllers=validatingadmissionpolicy-status-controller"],
        # Its functions of CEL, and those of the version before it, which a policy may use.
        "kube-apiserver": ["--emulated-version=1.34"],
    }
    components = ("etcd", "kube-apiserver", "kube-controller-manager")
    folder = tmp_path_factory.mktemp("policy")
    with ControlPlane(folder, address=f"{loopback}.3", components=components, extra_arguments=only) as running:
        running.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        wait_for(lambda: are_established(running), "both CRDs")
        yield running


def are_established(plane):
    """Whether all CRDs can be used. `kubectl wait` fails on those that have no conditions yet."""
    found = json.loads(plane.kubectl("get", "crd", "-o", "json"))["items"]
    conditions = [crd["status"].get("conditions") or [] for crd in found]
    return all(any((c["type"], c["status"]) == ("Established", "True") for c in each) for each in conditions)


def render(template="templatepolicy", **values):
    """The documents of a policy with these values under templatePolicy."""
    mode = values["namespaceSelector"]["matchLabels"]["policy"]
    command = [find_or_build("helm") / "helm", "template", mode, CHART, "-s", f"templates/{template}.yaml"]
    command += ["--kube-version", "1.37.0", "--set-json", f"templatePolicy={json.dumps(values)}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def create(plane):
    """Return a function that creates an RLJob in a dry run and returns (code, message, warnings)."""
    modes = {"deny": {"mode": "deny"}, "warn": {"mode": "warn"}, "allow": {"mode": "deny", "allow": ALLOW}}
    for mode, values in modes.items():
        plane.kubectl("apply", "-f", "-", input=render(namespaceSelector={"matchLabels": {"policy": mode}}, **values))
        plane.kubectl("create", "namespace", mode)
        plane.kubectl("label", "namespace", mode, f"policy={mode}")
    plane.kubectl("create", "namespace", "exempt")
    for role in ROLES:
        rules = [{"apiGroups": role["groups"], "resources": role["resources"], "verbs": ["create", "update", "patch"]}]
        rbac, meta = {"apiVersion": "rbac.authorization.k8s.io/v1"}, {"metadata": {"name": role["user"]}}
        subjects = [{"kind": "User", "name": role["user"], "apiGroup": "rbac.authorization.k8s.io"}]
        ref = {"kind": "ClusterRole", "name": role["user"], "apiGroup": "rbac.authorization.k8s.io"}
        bind = rbac | meta | {"kind": "ClusterRoleBinding", "subjects": subjects, "roleRef": ref}
        items = [rbac | meta | {"kind": "ClusterRole", "rules": rules}, bind]
        plane.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(items))
    with config.new_client_from_config(config_file=str(plane.kubeconfig)) as api:
        custom = client.CustomObjectsApi(api)

        def run(spec, *, namespace="deny", user=JOBS_AUTHOR, kind="RLJob"):
            api.set_default_header("Impersonate-User", user)
            plural = kind.lower() + "s"
            manifest = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "x"}, "spec": spec}
            try:
                _, code, headers = custom.create_namespaced_custom_object_with_http_info(
                    *API_VERSION.split("/"), namespace, plural, manifest, dry_run="All"
                )
            except client.ApiException as error:
                return error.status, json.loads(error.body)["message"], ""
            return code, "", headers.get("Warning", "")

        forbidden = build_spec(pod(hostPID=True))
        wait_for(lambda: run(forbidden)[0] == 403 and run(forbidden, namespace="warn")[2], "both modes are in force")
        yield run


def build_spec(patch):
    scope: dict = {}
    source = (CHART / "files" / "helm_test.py").read_text()
    exec(source[: source.index("def ask")], scope)
    return copy.deepcopy(scope["JOB"]["spec"]) | patch


def name_of(value):
    return json.dumps(value)[:80] if isinstance(value, dict) else None


@pytest.mark.parametrize(("patch", "message"), [*REFUSED_FOR_ALL, *REFUSED_WITHOUT_PODS], ids=name_of)
def test_template_is_refused_warned_about_or_allowed(create, patch, message):
    spec = build_spec(patch)
    code, refusal, _ = create(spec)
    assert code == 403
    assert message in refusal
    code, _, warning = create(spec, namespace="warn")
    assert (code, message in warning) == (201, True)
    is_reserved = message.startswith(("labels", "volumes")) and "hostPath" not in message
    assert create(spec, namespace="allow")[0] == (403 if is_reserved else 201)
    assert create(spec, namespace="exempt") == (201, "", "")
    may_create_pods = (patch, message) in REFUSED_WITHOUT_PODS
    assert create(spec, user=PODS_AUTHOR)[0] == (201 if may_create_pods else 403)


@pytest.mark.parametrize("patch", [*ALLOWED, *MALFORMED], ids=name_of)
def test_other_templates_pass(create, patch):
    assert create(build_spec(patch)) == (201, "", "")


def test_the_policy_of_fields_compiles_on_the_oldest_supported_version(plane):
    rendered = render("fieldpolicy", namespaceSelector={"matchLabels": {"policy": "fields"}})
    plane.kubectl("apply", "--dry-run=server", "-f", "-", input=rendered)


def test_reward_models_are_checked_too(create):
    spec = {"function": {"inline": "def compute_score(**_): return 0.0"}} | pod(hostIPC=True)["head"]
    code, message, _ = create(spec, kind="RewardModel")
    assert (code, "hostNamespaces (spec.template.spec.hostIPC)" in message) == (403, True)
    assert create({**spec, "template": {}}, kind="RewardModel")[0] == 201
    spec = judge(apiKeySecretRef={"name": "key", "key": "k"})["rewards"][0]["judge"]
    code, message, _ = create({"judge": spec}, kind="RewardModel")
    assert (code, "secrets (spec.judge.endpoint.apiKeySecretRef: key)" in message) == (403, True)
    assert create({"judge": spec}, kind="RewardModel", user=PODS_AUTHOR)[0] == 201


def test_fields_of_all_pods_are_checked_too(create):
    code, message, _ = create(build_spec({"priorityClassName": "system-cluster-critical"}))
    assert (code, "priorityClasses (spec.priorityClassName)" in message) == (403, True)
    code, message, _ = create(build_spec({"serviceAccountName": "trusted"}))
    assert (code, "serviceAccounts (spec.serviceAccountName: trusted)" in message) == (403, True)


def test_message_lists_everything_that_is_refused(create):
    spec = pod(hostPID=True, nodeName="n", containers=[{"name": "head", "securityContext": {"privileged": True}}])
    _, message, _ = create(build_spec(spec))
    found = {name for name in ALLOW if f"{name} (" in message}
    assert found == {"privileged", "hostNamespaces", "nodeName"}
    assert message.index("hostNamespaces (") < message.index("nodeName (") < message.index("privileged (")


def test_message_without_details_is_used_if_the_details_are_too_long(create):
    spec = pod(volumes=[{"name": f"v{i}", "hostPath": {"path": "/"}} for i in range(400)])
    code, message, _ = create(build_spec(spec))
    assert (code, "docs/security.md" in message) == (403, True)


def test_largest_specs_stay_within_the_cost_budget(create):
    env = [{"name": f"V{i}", "valueFrom": {"secretKeyRef": {"name": f"s{i}", "key": "k"}}} for i in range(60)]
    containers = [{"name": f"c{i}", "env": env, "securityContext": {"privileged": False}} for i in range(4)]
    template = {"spec": {"containers": containers, "volumes": [{"name": f"v{i}", "secret": {}} for i in range(40)]}}
    reward = build_spec({})["rewards"][0] | {"template": template}
    rewards = [reward | {"name": f"r{i}"} for i in range(16)]
    roles = {role: {"template": template} for role in ("head", "trainer", "rollout")}
    agent_role = {"template": template, "function": {"inline": "x"}}
    roles["agent"] = {"type": "loop", "user": agent_role, "tools": [agent_role | {"name": f"t{i}"} for i in range(16)]}
    code, message, _ = create(build_spec({"rewards": rewards} | roles), user=PODS_AUTHOR)
    assert not message, message
    assert code == 201


def test_existing_job_is_checked_only_when_its_spec_changes(create, plane):
    manifest = {"apiVersion": API_VERSION, "kind": "RLJob", "metadata": {"name": "old", "namespace": "deny"}}
    manifest["spec"] = build_spec(pod(hostNetwork=True))
    plane.kubectl("label", "namespace", "deny", "policy-")
    wait_for(lambda: create(manifest["spec"])[0] == 201, "the policy without the prohibition")
    plane.kubectl("apply", "-f", "-", input=json.dumps(manifest))
    plane.kubectl("label", "namespace", "deny", "policy=deny")
    wait_for(lambda: create(manifest["spec"])[0] == 403, "the policy with the prohibition")
    plane.kubectl("annotate", "rljob", "old", "-n", "deny", "rljob.dev/retry=1")
    for patch in ({"suspend": True}, {"suspend": False}, {"suspend": None}):
        patch_spec(plane, patch)
    with pytest.raises(ClusterError, match="hostNamespaces"):
        patch_spec(plane, {"schedule": {"steps": 7}})
    with pytest.raises(ClusterError, match="hostNamespaces"):
        patch_spec(plane, {"head": {"template": None, "image": "other"}, "trainer": manifest["spec"]["head"]})
    patch_spec(plane, {"head": {"template": {"spec": None}}})
    with pytest.raises(ClusterError, match="hostNamespaces"):
        patch_spec(plane, manifest["spec"])


def patch_spec(plane, patch):
    plane.kubectl("patch", "rljob", "old", "-n", "deny", "--type=merge", "-p", json.dumps({"spec": patch}))


def test_type_checker_finds_nothing_to_warn_about(create, plane):
    def read():
        items = json.loads(plane.kubectl("get", "validatingadmissionpolicies", "-o", "json"))["items"]
        return {item["metadata"]["name"]: item.get("status", {}) for item in items}

    wait_for(lambda: all("observedGeneration" in status for status in read().values()), "the type checker")
    assert len(read()) == 3
    assert not [warning for s in read().values() for warning in s.get("typeChecking", {}).get("expressionWarnings", [])]
