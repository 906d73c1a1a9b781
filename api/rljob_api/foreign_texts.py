"""Texts of other programs that RLJob reads, by the program and the version that write them.

Leaves to its readers what a text means. A release may word a text otherwise: then a remedy becomes the raw text, and
nothing fails. So tests compare VERSIONS with what is installed, and read a text of that version with each pattern.
"""

import re
from collections.abc import Mapping
from typing import Final

VERSIONS: Final[Mapping[str, str]] = {"kubernetes": "1.35.4", "datasets": "5.2.0"}
"""Those whose texts were read last. uv may have any version."""

# Answers of the API server, and messages of its admission.
TYPED_PATCH: Final = re.compile(
    r"failed to (create typed (patch|live) object|convert new object) \([^)]*\)( to proper version)?: "
    r"(unable to convert unstructured object to [^:]*: )?(?P<problem>.*)",
    re.DOTALL,
)
"""An apply whose fields or types the kind does not have, or whose object has such. The API server answers with 500."""
NAMESPACE_ENDS: Final = re.compile("being terminated|NamespaceTerminating")
MISSING_RIGHT: Final = re.compile("is forbidden: User")
DENIED: Final = re.compile(r"denied (the )?request: ")
"""Message of an admission webhook, and of a ValidatingAdmissionPolicy. Their code is what their author chose."""
SILENT_WEBHOOK: Final = re.compile("failed calling webhook")
NO_DRY_RUN: Final = re.compile("does not support dry run")
TOO_LARGE: Final = re.compile(r"message larger than max|request is too large")
"""Message of etcd, with code 500."""
QUOTA: Final = re.compile(r"(exceeded|(?P<unspecified>failed)) quota: ")
EXCEEDED_QUOTA: Final = re.compile(
    r"exceeded quota: \S+, requested: (?P<requested>.*), used: .*, limited: (?P<limited>.*)"
)
LIMIT_RANGE: Final = re.compile(
    r"must be less than or equal to \S+ limit of|imum \S+ usage per (Container|Pod) is|max limit to request ratio per"
)
"""A request above the limit that a LimitRange sets by default, or a value outside of its bounds."""
REJECTED_POD: Final = re.compile(
    r'(Error creating: |create Pod \S+ in StatefulSet \S+ failed error: )?([Pp]ods? "[^"]*" is (forbidden|invalid): )?'
)
"""What begins a message: the action, and the generated name of the Pod."""

# Events and states of Pods, by the scheduler and the kubelet.
PULL_SECRETS: Final = re.compile(r"image pull secrets \(([^)]+)\)")
SLOW_KUBELET: Final = re.compile(r"failed to sync \w+ cache: timed out")
"""A busy kubelet has not read the object yet. This resolves without help; nothing is missing."""
HELD_VOLUME: Final = re.compile(
    r"volume node affinity|PersistentVolume's node affinity|ReadWriteOncePod|Multi-Attach error"
)
"""A node, or a Pod, has a volume that can be on one at a time."""
UNBOUND_CLAIM: Final = re.compile("persistentvolumeclaim", re.IGNORECASE)
NODE_SELECTOR: Final = re.compile("node affinity/selector")
OVER_OWN_DISK: Final = re.compile(r"exceeds the (total )?limit|exceeded its local ephemeral storage limit")
"""In the message of an evicted Pod that used more disk than its own limits allow. Other evictions relieve the node."""

# uv.
UNREACHABLE_INDEX: Final = re.compile(
    r"connection|connect error|dns error|timed out|timeout|temporary failure|network is|"
    r"status code \(5\d\d|5\d\d (server error|bad gateway|service unavailable)|error sending request",
    re.IGNORECASE,
)
WRONG_REQUIREMENT: Final = re.compile("not found in the package|no versions? of|are incompatible|Couldn't parse")
"""What uv says about a line that no index can satisfy; not about one that it must build, or cannot reach."""
DISK_FULL: Final = re.compile(r"no space left|disk quota exceeded", re.IGNORECASE)

# datasets.
NO_SUBSET: Final = re.compile("BuilderConfig|Config name is missing")
NO_SPLIT: Final = re.compile("split", re.IGNORECASE)
