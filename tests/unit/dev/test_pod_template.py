"""The part of Kubernetes' schema that checks of Pod templates read."""

from dev.pod_template import select

_DEFINITIONS = {
    "Pod": {
        "description": "A Pod.",
        "properties": {"description": {"$ref": "#/$defs/Text"}, "spec": {"type": "object"}},
    },
    "Text": {"type": "string", "x-kubernetes-list-type": "atomic", "description": "A text."},
    "Node": {"type": "object"},
}


def test_only_what_is_referred_to_is_kept_and_without_descriptions():
    assert select(_DEFINITIONS, "Pod") == {
        "Pod": {"properties": {"description": {"$ref": "#/$defs/Text"}, "spec": {"type": "object"}}},
        "Text": {"type": "string"},
    }
