"""The operator's command-line settings. Pure."""

from dataclasses import dataclass

from rljob_core.defaults import DEFAULTS, Defaults


@dataclass(frozen=True)
class Settings:
    """See `python -m rljob_operator --help`."""

    kubeconfig: str | None = None
    namespaces: tuple[str, ...] = ()
    """Empty: all."""
    workers: int = 8
    resync_seconds: float = 180.0
    lease_namespace: str | None = None
    """None: the Pod's own, else `default`."""
    lease_name: str = "rljob-operator"
    lease: bool = True
    lease_seconds: int = 15
    """A dead leader is replaced after this time; a live one renews every 2/15 of the time."""
    metrics_port: int = 9090
    """0: none."""
    health_port: int = 8081
    defaults: Defaults = DEFAULTS
    """Contents of the file of --defaults, with the images of --trainer-image and --reward-image."""
    log_level: str = "info"
