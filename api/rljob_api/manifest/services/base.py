"""What every hosted service has: Pods, each with slots that execute requests and a queue before them.

Leaves what a slot executes, and how long it may take, to the module of each kind.
"""

from typing import ClassVar, Literal

from pydantic import Field

from rljob_api.manifest.base import Rule
from rljob_api.manifest.quantity import Size, size_within
from rljob_api.manifest.roles import WINDOW_FITS, Role, reserve_names
from rljob_api.manifest.scaling import Autoscaling
from rljob_api.wire.contract import ENV_DISABLE_ISOLATION

PythonVersion = Literal["3.11", "3.12", "3.13"]


class ServiceSettings(Role):
    """Fields of every service: a reward, a RewardModel, a simulated user, a tool, a runner."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        reserve_names(ENV_DISABLE_ISOLATION),
        WINDOW_FITS,
        size_within("maxRequestSize", "1Mi", "60Mi"),
    )

    replicas: int = Field(default=1, ge=1, le=4096)
    """Number of Pods. May change while the job runs. Ignored if autoscaling is set."""
    autoscaling: Autoscaling | None = None
    """Scales the number of Pods with demand. Null: replicas applies. May change while the job runs."""
    python: PythonVersion | None = None
    """Python that runs a function, such as "3.12" for packages that require it. On a cluster it chooses the image
    (defaults.pythonImages of the chart), unless `image` is set. `rljob run` takes it from this machine, where uv
    installs it if it is missing. Null: that of the image, or RLJob's own."""
    slots: int = Field(default=16, ge=1, le=4096)
    """Calls that one Pod executes concurrently, each in a worker process."""
    queue_length: int = Field(default=4096, ge=1)
    """Maximum queued calls per Pod. The server rejects further calls with 429 and Retry-After."""
    max_request_size: Size = Size("16Mi")
    """Maximum size of a call as JSON."""
