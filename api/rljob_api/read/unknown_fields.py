"""Leave out the fields that only newer versions know.

Apart from the types of jobs: a server of services reads one service, and starts without building those of a job.
"""

import copy
import logging
from typing import Any

from pydantic import ValidationError

from rljob_api.manifest.base import Spec
from rljob_api.read.documents import format_path

log = logging.getLogger(__name__)


def drop_unknown_fields(model: type[Spec], data: Any, source: str) -> Any:
    """Return the data without the fields that `model` does not have. `source` names it in the warning."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        unknown = [detail["loc"] for detail in error.errors(include_url=False) if detail["type"] == "extra_forbidden"]
        known = copy.deepcopy(data)
        for *parents, name in unknown:
            holder = known
            for part in parents:
                holder = holder[part]
            del holder[name]
        if unknown:
            fields = ", ".join(map(format_path, unknown))
            log.warning("%s: left out %s, which only newer versions know", source, fields)
        return known
    return data
