"""What a job waits for while its models or data cannot be read: the name in the status, and the remedy. Pure."""

from collections.abc import Iterable

from rljob_inputs.hub.repository import HubAccess
from rljob_inputs.objects.access import is_object
from rljob_trainer.outages.registry import hide_secrets


def name_storage(sources: Iterable[str], access: HubAccess) -> tuple[str, str]:
    """Return the field with the address, and what a user does about it: of the object storage, if no source is on the
    Hub."""
    kinds = {is_object(source) for source in sources if source.startswith("hf://") or is_object(source)}
    if kinds == {True}:
        address = hide_secrets(access.objects.place)
        return f"spec.objectStorage ({address})", "check the network, or set spec.objectStorage.endpoint"
    return f"spec.hub ({hide_secrets(access.url)})", "check the network, or set spec.hub.endpoint"
