from dev import pod_fields

DEFINITIONS = {
    "io.k8s.Pod": {
        "properties": {
            "spec": {"$ref": "#/$defs/io.k8s.Spec"},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        }
    },
    "io.k8s.Spec": {
        "properties": {
            "names": {"type": "array", "items": {"type": "string"}},
            "parts": {"type": "array", "items": {"$ref": "#/$defs/io.k8s.Part"}},
            "limits": {"type": "object", "additionalProperties": {"$ref": "#/$defs/api.resource.Quantity"}},
            "port": {"$ref": "#/$defs/util.IntOrString"},
            "any": {"type": "object"},
        }
    },
    "io.k8s.Part": {"properties": {"size": {"type": "integer"}, "on": {"type": "boolean"}}},
    "io.k8s.Other": {"properties": {"unused": {"type": "string"}}},
}
TABLE = {
    "Part": {"size": "i", "on": "b"},
    "Pod": {"spec": "Spec", "labels": "{s"},
    "Spec": {"names": "[s", "parts": "[Part", "limits": "{q", "port": "p", "any": "o"},
}


def test_the_table_has_the_kind_of_each_field_below_the_root():
    assert pod_fields.build_table(DEFINITIONS, "io.k8s.Pod") == TABLE


def test_levels_are_those_of_the_longest_way():
    assert pod_fields.count_levels(TABLE, "Pod") == 3


def test_each_kind_and_each_entry_has_its_types_in_cel():
    found = pod_fields.find_cel_types(TABLE)
    assert {kind for fields in TABLE.values() for kind in fields.values()} | {"Part", "s", "q"} == set(found)
    assert (found["[Part"], found["{q"], found["Part"], found["o"]) == (("list",), ("map",), ("map",), ("map",))
    assert (found["q"], found["p"]) == (("string", "int", "double"), ("string", "int"))


def test_the_chart_has_the_table_of_the_schema():
    assert pod_fields.FILE.read_text() == pod_fields.render(), "run `make generate`"
