"""Renderings of the chart against the schemas of four Kubernetes minors, and the schema of the values."""

from __future__ import annotations

import functools
import json
import subprocess

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from kubernetes_validate.utils import all_versions, major_minor, schema_contents
from referencing import Registry, Resource

from dev.values_table import _list_rows
from rljob_api.generate import crd
from rljob_cluster.host.go_programs import go_command
from rljob_cluster.host.paths import cache_root
from rljob_core.children.network import OPERATOR_LABELS
from rljob_core.defaults import Defaults
from tests.paths import ROOT
from tests.support import fast_yaml
from tests.support.operator_permissions import FEATURES, read_table

CHART = ROOT / "charts" / "rljob"
MINORS = ("1.34", "1.35", "1.36", "1.37")
VALUES = sorted((CHART / "ci").glob("*.yaml"))
CHILDREN = sorted((ROOT / "tests" / "data" / "plan").glob("*/children.yaml"))
UNKNOWN_GROUPS = ("monitoring.coreos.com/", "extensions.agents.x-k8s.io/")
"""Kubernetes' schemas do not contain the kinds of Prometheus Operator and agent-sandbox."""


def validate(objects, minor):
    for item in objects:
        if not item["apiVersion"].startswith(UNKNOWN_GROUPS):
            validate_once(json.dumps(item, sort_keys=True, default=str), minor)


@functools.cache
def validate_once(text, minor):
    """Cached: most objects are in every rendering."""
    item = json.loads(text)
    group, _, version = item["apiVersion"].rpartition("/")
    name = "-".join(filter(None, (item["kind"].lower(), group.partition(".")[0], version)))
    schema = read_schema(name, minor)
    Draft202012Validator(schema, registry=Resource.from_contents(schema) @ read_definitions(minor)).validate(item)


@functools.cache
def read_definitions(minor):
    """Cached: it takes longer than all else, and kubernetes_validate.validate would do it for each object."""
    return (Resource.from_contents(read_schema("_definitions", minor)) @ Registry()).crawl()


def read_schema(name, minor):
    version = next(v for v in reversed(all_versions()) if major_minor(v) == minor)
    return schema_contents(f"kubernetes-json-schema/v{version}-local-strict/{name}.json", version)


def test_kube_version_of_the_chart_is_the_oldest_tested_minor():
    kube_version = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    assert kube_version == f">={MINORS[0]}.0-0"
    assert set(MINORS) <= set(map(major_minor, all_versions())), "kubernetes-validate has no schemas of a minor"


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
@pytest.mark.parametrize("minor", MINORS)
def test_rendering_is_valid_in_each_supported_minor(render, values, minor):
    validate(render("--values", str(values), minor=minor), minor)


def test_validator_rejects_an_unknown_field(render):
    deployment = next(o for o in render() if o["kind"] == "Deployment")
    deployment["spec"]["replica"] = 1
    with pytest.raises(ValidationError, match="replica"):
        validate([deployment], MINORS[-1])


@pytest.mark.parametrize("path", CHILDREN, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("minor", MINORS)
def test_children_of_a_job_are_valid_in_each_supported_minor(path, minor):
    validate(fast_yaml.load_all(path.read_text()), minor)


def test_golden_files_contain_children():
    assert sum(path.stat().st_size > 0 for path in CHILDREN) >= 2


def test_helm_lint_finds_nothing(helm):
    helm("lint", "--strict", str(CHART))


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("replica=2", "replica"),
        ("image.tga=x", "tga"),
        ("logLevel=loud", "logLevel"),
        ("workers=0", "workers"),
        ("watchNamespaces={Not_A_Name}", "watchNamespaces"),
        ("image.digest=latest", "digest"),
        ("podDisruptionBudget.maxUnavailable=0", "maxUnavailable"),
        ("defaults.nodePools.trainer.nodeSelectr.pool=h100", "nodeSelectr"),
        ("defaults.nodePools.trainer.nodeSelector.pool=1", "pool"),
        ("defaults.nodePools.rollout.tolerations[0].operator=exists", "operator"),
        ("defaults.tolerations[0].effects=NoSchedule", "effects"),
    ],
)
def test_invalid_value_is_rejected_by_name(helm, setting, name):
    done = helm("template", "rljob", str(CHART), "--kube-version", "1.37.0", "--set", setting, check=False)
    assert done.returncode != 0
    assert name in done.stderr


def test_schema_and_defaults_have_the_same_values():
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(schema["properties"]) - {"global", "enabled"} == set(defaults)


def test_chart_may_be_a_dependency_with_a_condition():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    Draft202012Validator(schema).validate(values | {"enabled": True, "global": {"imageRegistry": "r"}})


def test_schema_describes_each_value_as_its_comment_does():
    schema, text = json.loads((CHART / "values.schema.json").read_text()), (CHART / "values.yaml").read_text()
    for path, _, meaning in _list_rows("", yaml.compose(text, Loader=yaml.SafeLoader), text.splitlines()):
        value = functools.reduce(lambda found, name: found["properties"][name], path.split("."), schema)
        assert value["description"], path
        assert meaning in ("", value["description"].replace("|", "\\|").replace("<", "&lt;")), path


def list_names(schema, root, path=""):
    """Yield the path of each field below a JSON schema: a wrong name there is refused."""
    if reference := schema.get("$ref"):
        schema = functools.reduce(lambda found, key: found[key], reference.removeprefix("#/").split("/"), root)
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from list_names(inner, root, f"{path}.{name}")
    for inner in (schema.get("items"), *schema.get("anyOf", ())):
        if isinstance(inner, dict):
            yield from list_names(inner, root, path)


def test_schema_has_the_fields_that_the_operator_reads():
    """The operator does not start with another one. Helm refuses it before anything is installed."""
    values, read = json.loads((CHART / "values.schema.json").read_text()), Defaults.model_json_schema(by_alias=True)
    assert {*list_names(values["properties"]["defaults"], values)} == {*list_names(read, read)}


def test_braces_in_a_rule_are_not_rendered(helm, tmp_path):
    manifest = {"metadata": {"name": "x"}, "spec": {"message": "say {{ .Values.secret }} or `{{`"}}
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: x\nversion: 0.1.0\n")
    (tmp_path / "templates" / "x.yaml").write_text(crd.build_chart_template(manifest))
    done = helm("template", "x", str(tmp_path), "--set", "crds.install=true")
    assert yaml.safe_load(done.stdout)["spec"] == manifest["spec"]


def test_crds_of_the_chart_equal_those_of_the_crds_folder(render):
    rendered = {o["metadata"]["name"]: o for o in render() if o["kind"] == "CustomResourceDefinition"}
    written = {p.stem: fast_yaml.load(p.read_text()) for p in (ROOT / "crds").glob("*.yaml")}
    assert len(rendered) == 3
    for item in rendered.values():
        assert item["metadata"]["annotations"].pop("helm.sh/resource-policy") == "keep"
    assert rendered == written


def expand(rules):
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("features", [[], *([name] for name in FEATURES), FEATURES], ids=",".join)
def test_roles_grant_exactly_the_verbs_of_the_read_table(render, features):
    sets = ["rbac.aggregate=false", "helmTest.enabled=false", *(f"features.{name}=true" for name in features)]
    roles = [o for o in render("--set", ",".join(sets)) if o["kind"].endswith("Role")]
    assert set().union(*(expand(role["rules"]) for role in roles)) == read_table(*features)


def test_each_feature_has_a_row_in_the_read_table():
    assert all(read_table(name) > read_table() for name in FEATURES)


def list_fields(schema, path=""):
    """Yield (path, schema) of each property below a schema."""
    for name, inner in (schema.get("properties") or {}).items():
        yield f"{path}.{name}", inner
        yield from list_fields(inner, f"{path}.{name}")
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            yield from list_fields(inner, f"{path}[]")


def test_template_policy_checks_every_field_that_reaches_pods_or_secrets(render):
    objects = render()
    fields = {
        path: inner
        for crd_ in objects
        if crd_["kind"] == "CustomResourceDefinition"
        for path, inner in list_fields(crd_["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"])
    }
    assert {path for path in fields if path.endswith("ecretRef") or path.endswith("ecretKeyRef")} == {
        ".hub.tokenSecretRef",
        ".objectStorage.secretRef",
        ".tracing.headersSecretRef",
        ".judge.endpoint.apiKeySecretRef",
        ".rewards[].judge.endpoint.apiKeySecretRef",
        ".rewards[].teacher.endpoint.apiKeySecretRef",
        ".agent.user.model.endpoint.apiKeySecretRef",
        ".agent.models[].apiKeySecretRef",
    }, "the template policy must check new references to Secrets (its variable secretRefs)"
    templates = {p for p, s in fields.items() if p.endswith(".template") and s.get("type") == "object"}
    roles = ("head", "trainer", "rollout", "rewards[]", "agent.user", "agent.tools[]", "agent.runner")
    assert templates == {".template", *(f".{role}.template" for role in roles)}, (
        "the template policy must check new templates (its variable roles)"
    )


def test_operator_pods_have_the_labels_that_jobs_and_explain_use(render):
    for name in ("rljob", "other"):
        pods = next(o for o in render("--set", f"fullnameOverride={name}") if o["kind"] == "Deployment")["spec"]
        assert OPERATOR_LABELS.items() <= pods["template"]["metadata"]["labels"].items()


def test_helm_test_has_a_pod_and_permission_to_create_a_job(render):
    hooks = {o["kind"]: o for o in render() if "helm.sh/hook" in (o["metadata"].get("annotations") or {})}
    assert set(hooks) == {"ServiceAccount", "Role", "RoleBinding", "Pod"}, "objects that .helmignore excludes never run"
    assert {o["metadata"]["annotations"]["helm.sh/hook"] for o in hooks.values()} == {"test"}
    assert expand(hooks["Role"]["rules"]) == {("rljob.dev", "rljobs", "create")}


def test_namespaced_mode_has_no_cluster_role_except_for_crds(render):
    objects = render("--set", "watchNamespaces={a,b},rbac.aggregate=false,helmTest.enabled=false")
    cluster = [o for o in objects if o["kind"] == "ClusterRole"]
    assert {resource for o in cluster for _, resource, _ in expand(o["rules"])} == {"customresourcedefinitions"}
    roles = {o["metadata"]["namespace"] for o in objects if o["kind"] == "Role"}
    assert roles == {"a", "b", "ops"}


def test_helm_unittest_suites_pass():
    program = cache_root() / "helm-unittest"
    program.parent.mkdir(parents=True, exist_ok=True)
    package = "github.com/helm-unittest/helm-unittest/cmd/helm-unittest"
    build = [*go_command(), "build", "-mod=readonly", "-o", str(program), package]
    done = subprocess.run(build, cwd=ROOT / "charts" / "helm-unittest", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([str(program), str(CHART)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
