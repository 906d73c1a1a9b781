"""Conversion of a container to a process: references, paths, environment."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import pytest

from rljob_api.wire.contract import ENV_CONTAINER_ENV, ENV_HOSTS_FILE
from rljob_cli.local.node.podspec import ContainerConfigError, Mount, PodContext, build_process, expand, replace_mounts

OBJECTS = {
    ("Secret", "token"): {"data": {"token": base64.b64encode(b"secret").decode()}},
    ("ConfigMap", "config"): {"data": {"level": "info"}},
}
POD = {"metadata": {"name": "pod-0", "namespace": "ns", "labels": {"role": "head"}}, "spec": {"containers": []}}
MOUNTS = (Mount("/etc/rljob", Path("/run/config")), Mount("/etc/rljob/deep", Path("/run/deep")))


def process(**container):
    context = PodContext(
        pod=POD,
        address="127.12.9.1",
        mounts=MOUNTS,
        hosts_file=Path("/run/hosts"),
        find=lambda kind, name: OBJECTS.get((kind, name)),
        base_env={"PATH": "/bin", "LEVEL": "base"},
    )
    return build_process({"name": "c", "command": ["true"], **container}, context)


def env_from(value):
    return process(env=[{"name": "X", "valueFrom": value}]).env["X"]


def test_values_from_fields_secrets_and_config_maps():
    assert env_from({"fieldRef": {"fieldPath": "status.podIP"}}) == "127.12.9.1"
    assert env_from({"fieldRef": {"fieldPath": "metadata.name"}}) == "pod-0"
    assert env_from({"fieldRef": {"fieldPath": "metadata.labels['role']"}}) == "head"
    assert env_from({"secretKeyRef": {"name": "token", "key": "token"}}) == "secret"
    assert env_from({"configMapKeyRef": {"name": "config", "key": "level"}}) == "info"


@pytest.mark.parametrize(
    "reference",
    [
        {"secretKeyRef": {"name": "none", "key": "token"}},
        {"configMapKeyRef": {"name": "config", "key": "none"}},
        {"fieldRef": {"fieldPath": "spec.none"}},
    ],
)
def test_reference_to_a_missing_object_is_an_error(reference):
    with pytest.raises(ContainerConfigError, match="none"):
        env_from(reference)


def test_optional_reference_to_a_missing_object_omits_the_variable():
    optional = {"secretKeyRef": {"name": "none", "key": "token", "optional": True}}
    with pytest.raises(ContainerConfigError):
        env_from({"secretKeyRef": {"name": "none", "key": "token"}})
    assert "X" not in process(env=[{"name": "X", "valueFrom": {"configMapKeyRef": {**optional["secretKeyRef"]}}}]).env


def test_variables_are_expanded_in_commands_and_later_variables():
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)2"}]
    built = process(command=["run", "--b=$(B)"], args=["$(NONE)", "$$(A)"], env=env)
    assert built.argv == ("run", "--b=12", "$(NONE)", "$(A)")


def test_unknown_reference_stays_and_two_dollars_become_one():
    assert expand("$(X) $$ $$(X)", {}) == "$(X) $ $(X)"


def test_mount_paths_are_replaced_as_complete_prefixes_longest_first():
    assert replace_mounts("--config=/etc/rljob/job.yaml", MOUNTS) == "--config=/run/config/job.yaml"
    assert replace_mounts("/etc/rljob/deep/x:/etc/rljob", MOUNTS) == "/run/deep/x:/run/config"
    assert replace_mounts("/etc/rljobs /my/etc/rljob", MOUNTS) == "/etc/rljobs /my/etc/rljob"


def test_paths_below_tmp_are_what_the_user_wrote():
    mounts = (Mount("/tmp", Path("/run/tmp")), Mount("/tmp/cache", Path("/run/cache")))
    assert replace_mounts("/tmp/data/x.json:/tmp", mounts) == "/tmp/data/x.json:/tmp"
    assert replace_mounts("/tmp/cache/x", mounts) == "/run/cache/x", "a mount of the job's template"
    assert replace_mounts("/tmp/x", mounts[:1]) == "/tmp/x"


def test_python_is_this_interpreter_and_container_env_overrides_base_env():
    built = process(command=["python", "-m", "x"], env=[{"name": "LEVEL", "value": "own"}])
    assert built.argv[0] == sys.executable
    assert (built.env["LEVEL"], built.env["PATH"], built.env[ENV_HOSTS_FILE]) == ("own", "/bin", "/run/hosts")
    assert built.env[ENV_CONTAINER_ENV] == "LEVEL", "functions see only these of the shell's"


def test_container_without_a_command_is_an_error():
    with pytest.raises(ContainerConfigError, match="no command"):
        process(command=[])
