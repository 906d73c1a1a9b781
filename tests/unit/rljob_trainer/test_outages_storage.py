"""What a job waits for while its models or data cannot be read."""

from rljob_inputs.hub import HubAccess
from rljob_inputs.objects.access import ObjectAccess
from rljob_trainer.outages import name_storage

ACCESS = HubAccess("https://mirror", None, ObjectAccess("https://user:secret@storage:9000"))


def test_storage_is_named_if_no_source_is_on_the_hub():
    what, remedy = name_storage(["s3://b/model", "/data/rows.jsonl"], ACCESS)
    assert what.startswith("spec.objectStorage (https://")
    assert "secret" not in what
    assert remedy == "check the network, or set spec.objectStorage.endpoint"


def test_hub_is_named_otherwise():
    for sources in (["hf://org/name", "s3://b/rows"], ["hf://org/name"], ["/models/tiny"]):
        assert name_storage(sources, ACCESS) == (
            "spec.hub (https://mirror)",
            "check the network, or set spec.hub.endpoint",
        )
