"""The vLLM sidecar of a reward server, and the env of a judge or a model user with an endpoint."""

import json

import pytest
import yaml

from rljob_api.manifest.services.reward import RewardModel
from rljob_api.wire.contract import ENV_HANG_DETECTION, ENV_JUDGE_API_KEY, ENV_PEERS, ENV_TOKEN, ENV_VLLM_SOCKET
from rljob_core.children import build_children
from rljob_core.children.service import build_server, service_of
from rljob_core.defaults import DEFAULTS
from rljob_core.plan.validate import find_problems
from tests.support import job_simulation

JUDGE = {"template": "{{ completion }}", "parser": {"regex": "(.)"}}
SERVED = {"judge": JUDGE | {"model": {"source": "hf://org/judge", "gpusPerReplica": 2}}}
ENDPOINT = {"url": "https://api.example.com/v1", "model": "m"}


def make_job(**reward):
    return job_simulation.make_job(rewards=[{"name": "good", **reward}])


def child(job, kind, name="gsm8k-reward-good"):
    children = build_children(job, "token", DEFAULTS)
    return next(c for c in children if c["kind"] == kind and c["metadata"]["name"] == name)


def pod_spec(**reward):
    return child(make_job(**reward), "Deployment")["spec"]["template"]["spec"]


def env_of(container):
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_vllm_sidecar_uses_the_trainer_image_and_shares_only_a_socket():
    spec = pod_spec(**SERVED)
    (vllm,), (server,) = spec["initContainers"], spec["containers"]
    assert (vllm["restartPolicy"], vllm["image"]) == ("Always", DEFAULTS.trainer_image)
    assert vllm["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert "limits" not in server["resources"], "the GPUs are vLLM's"
    socket = env_of(server)[ENV_VLLM_SOCKET]
    assert vllm["command"][vllm["command"].index("--uds") + 1] == socket
    assert "--port" not in vllm["command"]
    assert ENV_TOKEN not in env_of(vllm), "vLLM needs no token"
    shared = {m["name"] for m in vllm["volumeMounts"]} & {m["name"] for m in server["volumeMounts"]}
    assert shared == {"vllm"}
    names = [volume["name"] for volume in spec["volumes"]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("seconds", "expected"), [(None, 1800), (3600, 3600)])
def test_server_waits_for_its_model_until_the_startup_timeout(seconds, expected):
    model = SERVED["judge"]["model"] | ({} if seconds is None else {"startupTimeoutSeconds": seconds})
    probe = pod_spec(judge=JUDGE | {"model": model})["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == expected


@pytest.mark.parametrize(
    ("image", "program"),
    [({}, "rljob_trainer.rollout.sidecar"), ({"image": "vllm/vllm-openai"}, "vllm.entrypoints.openai.api_server")],
)
def test_image_of_the_user_needs_no_program_of_rljob(image, program):
    vllm = pod_spec(model={"source": "pvc://models/rm", **image})["initContainers"][0]
    assert vllm["command"][4:7] == ["python", "-m", program]


def test_sidecar_watches_its_engine_with_the_bounds_of_the_job():
    bounds = {"minSeconds": 5, "maxSeconds": 600}
    job = job_simulation.make_job(rewards=[{"name": "good", **SERVED}], hangDetection=bounds)
    (vllm,) = child(job, "Deployment")["spec"]["template"]["spec"]["initContainers"]
    assert json.loads(env_of(vllm)[ENV_HANG_DETECTION]) == bounds
    assert ENV_HANG_DETECTION not in env_of(pod_spec(**SERVED)["initContainers"][0]), "the program has the defaults"


def test_only_a_model_uses_the_pooling_runner():
    model = pod_spec(model={"source": "pvc://models/rm", "maxBatchedTokens": 4096})
    command = model["initContainers"][0]["command"]
    assert command[command.index("--runner") :][:4] == ["--runner", "pooling", "--convert", "classify"]
    assert command[command.index("--max-num-batched-tokens") + 1] == "4096"
    assert command[command.index("--model") + 1] == "/mnt/pvc/models/rm"
    assert any("persistentVolumeClaim" in volume for volume in model["volumes"])
    assert "/mnt/pvc/models" not in [mount["mountPath"] for mount in model["containers"][0]["volumeMounts"]]
    assert "--runner" not in pod_spec(**SERVED)["initContainers"][0]["command"]


def test_endpoint_has_secret_key_and_peers_only_with_limits():
    reference = {"apiKeySecretRef": {"name": "keys", "key": "openai"}}
    spec = pod_spec(judge=JUDGE | {"endpoint": ENDPOINT | reference})
    assert "initContainers" not in spec
    env = env_of(spec["containers"][0])
    assert env[ENV_JUDGE_API_KEY] == {"secretKeyRef": {"name": "keys", "key": "openai"}}
    assert ENV_PEERS not in env
    limited = pod_spec(judge=JUDGE | {"endpoint": ENDPOINT | {"limits": {"concurrency": 8}}})
    assert env_of(limited["containers"][0])[ENV_PEERS] == "gsm8k-reward-good"


def test_function_has_no_sidecar_and_no_key():
    spec = pod_spec(function={"inline": "def reward(): ..."})
    assert "initContainers" not in spec
    assert not {ENV_VLLM_SOCKET, ENV_JUDGE_API_KEY, ENV_PEERS} & set(env_of(spec["containers"][0]))


@pytest.mark.parametrize(
    ("reward", "ports"),
    [
        ({"judge": JUDGE | {"endpoint": ENDPOINT}}, [443]),
        ({"judge": JUDGE | {"endpoint": ENDPOINT | {"url": "http://vllm.other:8000/v1"}}}, [8000]),
        (SERVED, [443]),
        ({"model": {"source": "pvc://models/rm"}}, None),
    ],
)
def test_egress_is_open_only_to_endpoint_and_hub(reward, ports):
    egress = child(make_job(**reward), "NetworkPolicy")["spec"]["egress"]
    opened = [[port["port"] for port in rule["ports"]] for rule in egress]
    assert opened == ([] if ports is None else [[53, 53, 5353, 5353], ports])


PERSONA = {"persona": "You want {{ ground_truth }}."}
OTHER_PORT = ENDPOINT | {"url": "http://vllm.other:8000/v1", "limits": {"concurrency": 8}}
KEY = {"apiKeySecretRef": {"name": "keys", "key": "openai"}}


def make_user_job(**model):
    return job_simulation.make_agent_job(user={"function": None, "model": PERSONA | model})


def test_model_user_has_the_sidecar_of_a_judge():
    job = make_user_job(model={"source": "hf://org/user", "gpusPerReplica": 2})
    spec = child(job, "Deployment", "gsm8k-agent-user")["spec"]["template"]["spec"]
    (vllm,), (judges,) = spec["initContainers"], pod_spec(**SERVED)["initContainers"]
    assert vllm == {**judges, "command": [word.replace("org/judge", "org/user") for word in judges["command"]]}
    assert spec["containers"][0]["command"][-2:] == ["--serves", "user"]
    assert env_of(spec["containers"][0])[ENV_VLLM_SOCKET]
    config = yaml.safe_load(child(job, "ConfigMap", "gsm8k-agent-user")["data"]["service.yaml"])
    assert config["userModel"] == PERSONA | {"model": {"source": "hf://org/user", "gpusPerReplica": 2}}


def test_model_user_with_an_endpoint_has_its_key_peers_and_egress():
    job = make_user_job(endpoint=OTHER_PORT | KEY)
    spec = child(job, "Deployment", "gsm8k-agent-user")["spec"]["template"]["spec"]
    assert "initContainers" not in spec
    env = env_of(spec["containers"][0])
    assert env[ENV_JUDGE_API_KEY] == {"secretKeyRef": {"name": "keys", "key": "openai"}}
    assert env[ENV_PEERS] == "gsm8k-agent-user"
    egress = child(job, "NetworkPolicy", "gsm8k-agent-user")["spec"]["egress"]
    assert [[port["port"] for port in rule["ports"]] for rule in egress] == [[53, 53, 5353, 5353], [8000]]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"model": {"source": "./user"}}, "spec.agent.user.model.model.source must be hf://org/name"),
        ({"endpoint": ENDPOINT | {"url": "http://x:0"}}, "spec.agent.user.model.endpoint.url must name a host"),
    ],
)
def test_problem_of_a_model_user_has_its_field(model, problem):
    (found,) = find_problems(make_user_job(**model))
    assert found.startswith(problem)


def test_changed_persona_restarts_only_the_user():
    jobs = [make_user_job(endpoint=ENDPOINT, persona=persona) for persona in ("Be kind.", "Be harsh.")]

    def digests(job):
        templates = {
            c["metadata"]["name"]: c["spec"].get("template") for c in build_children(job, "t", DEFAULTS) if "spec" in c
        }
        return {name: t["metadata"]["annotations"] for name, t in templates.items() if t}

    first, second = map(digests, jobs)
    assert [name for name in first if first[name] != second[name]] == ["gsm8k-agent-user"]


def test_changed_judge_template_does_not_restart_the_head():
    def head(job):
        template = child(job, "Job", "gsm8k-head")["spec"]["template"]
        return env_of(template["spec"]["containers"][0]), template["metadata"]["annotations"]

    env, before = head(make_job(**SERVED))
    assert env["RLJOB_REWARD_SERVICES"] == '{"good": "gsm8k-reward-good"}'
    changed = SERVED["judge"] | {"template": "Other: {{ completion }}"}
    assert head(make_job(judge=changed))[1] == before


def test_reward_model_has_the_same_pod():
    model = RewardModel.model_validate({"metadata": {"name": "shared", "uid": "u"}, "spec": SERVED})
    deployment = build_server(service_of(model), "token", DEFAULTS)[1]
    spec = deployment["spec"]["template"]["spec"]
    assert spec["initContainers"] == pod_spec(**SERVED)["initContainers"]


def test_relative_source_is_rejected_on_a_cluster():
    (problem,) = find_problems(make_job(judge=JUDGE | {"model": {"source": "./judge"}}))
    assert problem.startswith("spec.rewards[0].judge.model.source must be")


def test_user_template_can_change_the_sidecar():
    more = {"spec": {"initContainers": [{"name": "vllm", "env": [{"name": "HF_TOKEN", "value": "x"}]}]}}
    spec = pod_spec(**SERVED, template=more)
    assert env_of(spec["initContainers"][0])["HF_TOKEN"] == "x"
    assert "--uds" in spec["initContainers"][0]["command"]
