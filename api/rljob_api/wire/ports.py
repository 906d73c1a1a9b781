"""The ports at which a run's programs listen: those of contract.py, shifted by one number for all programs of a run.

On a cluster each Pod has its own network, and nothing is shifted. `rljob run` shifts them to ports that no program of
the machine uses. Invariant: programs listen and connect only through `listening_port`; manifests are never shifted.
"""

import os

from rljob_api.wire.contract import ENV_PORT_OFFSET


def listening_port(port: int) -> int:
    """Return where this run's programs listen instead of `port`, one of the ports in contract.py."""
    return port + int(os.environ.get(ENV_PORT_OFFSET) or 0)
