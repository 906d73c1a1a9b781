"""A training service on a real cluster: its clients, with the unchanged SDK, do not notice what dies."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator

import pytest
import tinker
from harness import NAMESPACE, Cluster, Job
from tinker import types

NAME, MODEL = "service", "tiny"
SERVICE = {"clients": ["ann", "bob"], "maxRank": 8, "modelName": MODEL}
STEPS = 6
TOKENS = [5, 9, 12, 40, 41, 42, 43, 44]
DATUM = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs={"target_tokens": TOKENS[1:]})
ADAM = types.AdamParams(learning_rate=1e-2)


@contextlib.contextmanager
def forwarding(cluster: Cluster) -> Iterator[str]:
    """Yield the service's address, through `kubectl port-forward` to the Pod that the head has now."""
    command = [*cluster.kubectl_command, "port-forward", "-n", NAMESPACE, f"svc/{NAME}-head", ":8700"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found, "kubectl port-forward did not start"
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        process.kill()
        process.wait()


class Service:
    def __init__(self, cluster: Cluster, submit: Callable[..., Job]) -> None:
        # What a service does not have is removed.
        removed = dict.fromkeys(("data", "rewards", "algorithm", "schedule"))
        self.cluster = cluster
        self.job = submit(NAME, **removed, rollout={"sampling": None}, service=SERVICE)
        self.wait()

    def wait(self) -> None:
        """Until clients are served."""

        def is_serving() -> bool:
            status, condition = self.job.status, self.job.condition("Progressing")
            return (status.get("phase"), condition.get("reason")) == ("Running", "Serving")

        self.job.wait_for("serving", is_serving)

    def key(self, client: str) -> str:
        data = self.cluster.get("secret", f"{NAME}-clients")["data"]
        return base64.b64decode(data[client]).decode()

    def patch(self, **spec: object) -> None:
        self.cluster.kubectl("patch", "rljob", "-n", NAMESPACE, NAME, "--type=merge", "-p", json.dumps({"spec": spec}))


@pytest.fixture(scope="module")
def service(cluster: Cluster, submit: Callable[..., Job]) -> Service:
    return Service(cluster, submit)


def train(service: Service, disturb: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Return the loss and the number of the update of each step. `disturb`: called while commands are under way."""
    with forwarding(service.cluster) as url:
        client = tinker.ServiceClient(base_url=url, api_key=service.key("ann"))
        training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=7).result()
        losses, updates = list[float](), list[float]()
        for step in range(STEPS):
            forward, update = training.forward_backward([DATUM], "cross_entropy"), training.optim_step(ADAM)
            if step == STEPS // 2:
                disturb()
            losses.append(forward.result().metrics["loss:sum"])
            updates.append(update.result().metrics["num_updates"])
        client.close("success").result()
    return losses, updates


@pytest.fixture(scope="module")
def undisturbed(service: Service) -> tuple[list[float], list[float]]:
    return train(service, lambda: None)


def test_a_loop_learns_and_the_status_says_whom_it_serves(service, undisturbed):
    losses, updates = undisturbed
    assert losses[-1] < losses[0]
    assert updates == list(range(1, STEPS + 1))
    assert "client" in service.job.condition("Progressing")["message"]


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_a_loop_has_the_same_losses_whichever_pod_dies(service, undisturbed, role):
    assert train(service, lambda: service.job.delete_pod(role)) == undisturbed


def test_a_suspended_service_has_the_same_keys_and_serves_again(service, undisturbed):
    key = service.key("bob")
    service.patch(suspend=True)
    service.job.wait_for("no Pods", lambda: not service.cluster.pods(NAME, "head"))
    service.patch(suspend=False)
    service.wait()
    assert service.key("bob") == key
    assert train(service, lambda: None) == undisturbed
