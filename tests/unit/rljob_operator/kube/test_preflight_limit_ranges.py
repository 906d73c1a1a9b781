import pytest

from rljob_core.kube.client import ApiError
from rljob_operator.kube.preflight import describe, is_about_limits

REQUESTS = "spec.containers[0].resources.requests"
ABOVE = 'Invalid value: "1Gi": must be less than or equal to memory limit of 512Mi'


def pod(**resources):
    return {"containers": [{"name": "trainer", "resources": {"requests": {"memory": "1Gi"}} | resources}]}


def invalid(field=REQUESTS, message=ABOVE):
    return ApiError(422, "Invalid", f"{field}: {message}", [{"field": field, "message": message}])


def ranges(**fields):
    return [
        {
            "metadata": {"name": "other"},
            "spec": {"limits": [{"type": "PersistentVolumeClaim", "max": {"storage": "1"}}]},
        },
        {"metadata": {"name": "none"}, "spec": {"limits": None}},
        {"metadata": {"name": "small"}, "spec": {"limits": [{"type": "Container"} | fields]}},
    ]


@pytest.mark.parametrize("field", ["default", "max"])
def test_default_limit_below_a_request_names_its_limit_range(field):
    assert is_about_limits(invalid(), pod())
    text = "limits memory of containers without a limit to 512Mi, below the request of 1Gi of container trainer"
    assert describe(invalid(), pod(), ranges(**{field: {"memory": "0.5Gi"}})) == f"LimitRange small {text}"
    assert describe(invalid(), pod(), []) == f"a LimitRange {text}"


def test_container_is_found_though_webhooks_add_others_before_it():
    error = invalid("spec.containers[1].resources.requests")
    assert "of container trainer" in describe(error, pod(), [])


@pytest.mark.parametrize(
    ("error", "spec"),
    [
        (invalid(), pod(limits={"memory": "512Mi"})),
        (invalid(), pod(requests=None)),
        (invalid("spec.containers[0].image"), pod()),
        (invalid(message="Required value"), pod()),
        (invalid(message=ABOVE.replace("1Gi", "2Gi")), pod()),  # of a container that a webhook adds
        (invalid("spec.initContainers[0].resources.requests"), pod()),
        (ApiError(403, "Forbidden", "violates PodSecurity"), pod()),
    ],
)
def test_other_refusals_are_not_about_limit_ranges(error, spec):
    assert not is_about_limits(error, spec)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("maximum memory usage per Container is 1Gi, but limit is 2Gi", {"max": {"memory": "1024Mi"}}),
        ("minimum cpu usage per Container is 100m, but request is 50m", {"min": {"cpu": "0.1"}}),
        ("minimum cpu usage per Container is 100m.  No request is specified", {"min": {"cpu": "100m"}}),
        (
            "cpu max limit to request ratio per Container is 2, but provided ratio is 4.000000",
            {"maxLimitRequestRatio": {"cpu": "2"}},
        ),
    ],
)
def test_bound_names_the_limit_range_that_has_it(message, fields):
    error = ApiError(403, "Forbidden", f'pods "x" is forbidden: {message}')
    assert is_about_limits(error, pod())
    assert describe(error, pod(), ranges(**fields)).startswith("LimitRange small: ")
    assert describe(error, pod(), ranges()).startswith("a LimitRange: ")
