"""The environment of user code: the same under `rljob run`, `rljob test-reward` and on a cluster. Pure.

A function sees a fixed list and what its container's manifest sets (the job's `env`). Invariant: neither RLJob's own
variables, such as the token, nor secrets of the shell that a server was started from reach a function.
"""

from collections.abc import Mapping

from rljob_api.wire.contract import ENV_CONTAINER_ENV
from rljob_service.worker.process.scratch import HOME_VARIABLES

_FIXED = frozenset(
    (
        *("PATH", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ"),
        *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONHASHSEED"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
        # Models that are already on this machine; not HF_TOKEN.
        *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
        *("TRANSFORMERS_OFFLINE", "CUDA_VISIBLE_DEVICES"),  # of a Pod without GPUs: none
    )
)
_FIXED_PREFIX = "LC_"
_OWN_PREFIX = "RLJOB_"
# One slot is one process on one core: libraries must not start a thread per core of the node in each worker.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "POLARS_MAX_THREADS")


def build_environment(environ: Mapping[str, str], scratch: str) -> dict[str, str]:
    """Return the environment of a worker from that of its server."""
    named = environ.get(ENV_CONTAINER_ENV, "").split()
    environment = dict.fromkeys(_ONE_THREAD, "1")
    environment |= {name: value for name, value in environ.items() if _is_passed(name, named)}
    home = environ.get("HOME")
    if home and "HF_HOME" not in environment:
        environment["HF_HOME"] = f"{home}/.cache/huggingface"  # downloaded models stay readable
    return environment | dict.fromkeys(HOME_VARIABLES, scratch)


def _is_passed(name: str, named: list[str]) -> bool:
    if name.startswith(_OWN_PREFIX):
        return False
    return name in _FIXED or name.startswith(_FIXED_PREFIX) or name in named or "*" in named
