"""The probes of Pods: whether a program has started, is alive, and is ready."""

from rljob_api.wire import contract
from rljob_core.backend import Manifest

_STARTUP_PERIOD_SECONDS = 5
_HUNG_GRACE_SECONDS = 10
_PATIENCE_SECONDS = 60
"""For which a program may answer nothing before it is killed."""


def build_probes(port_name: str, startup_seconds: int, failure_threshold: int = 2) -> Manifest:
    """Readiness probes the program, liveness a path that is answered whenever its event loop runs: a rollout with old
    weights, or a reward server with a full queue, is unready but alive, and a restart would make it worse. A port is no
    sign of life: the kernel accepts connections of a stopped process. `failure_threshold`: of readiness."""
    live = {"path": contract.UrlPath.LIVE.value, "port": port_name}
    return {
        "startupProbe": {
            "tcpSocket": {"port": port_name},
            "periodSeconds": _STARTUP_PERIOD_SECONDS,
            "failureThreshold": startup_seconds // _STARTUP_PERIOD_SECONDS,
        },
        "livenessProbe": build_liveness({"httpGet": live}, _PATIENCE_SECONDS),
        "readinessProbe": build_readiness(port_name) | {"failureThreshold": failure_threshold},
    }


def build_liveness(action: Manifest, patience_seconds: int, period_seconds: int = 10) -> Manifest:
    """A program that answers nothing does not hear SIGTERM, so it gets little time to end."""
    return action | {
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": patience_seconds // period_seconds,
        "terminationGracePeriodSeconds": _HUNG_GRACE_SECONDS,
    }


def build_readiness(port_name: str) -> Manifest:
    return {
        "httpGet": {"path": str(contract.UrlPath.READY), "port": port_name},
        "periodSeconds": 5,
        "timeoutSeconds": 3,
        "failureThreshold": 2,
    }
