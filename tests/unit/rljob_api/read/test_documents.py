from __future__ import annotations

import pytest

from rljob_api.read.documents import format_path, read_documents


def test_lines_of_keys_and_entries() -> None:
    (document,), problems = read_documents("a:\n  b:\n  - x: 1\n  - 2\n")
    assert problems == []
    assert document.lines == {
        (): 1,
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "b", 0): 3,
        ("a", "b", 0, "x"): 3,
        ("a", "b", 1): 4,
    }


def test_line_of_a_missing_location_is_that_of_its_parent() -> None:
    (document,), _ = read_documents("first: 1\na:\n  b: 1\n")
    assert document.line_of(("a", "missing", 3)) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("3.0e-5", 3e-5),
        ("-.5", -0.5),
        ("7", 7),
        ("2026-01-01", "2026-01-01"),
        ("1e", "1e"),
        ("hf://a/b", "hf://a/b"),
        ("yes", True),
        ("y", True),
        ("12:30", "12:30"),
        ("~", None),
    ],
)
def test_scalars_have_the_types_that_kubernetes_gives_them(text: str, value: object) -> None:
    (document,), _ = read_documents(f"a: {text}")
    assert document.data == {"a": value}
    assert type(document.data["a"]) is type(value)


@pytest.mark.parametrize(
    ("text", "path", "data"),
    [
        ('spec:\n  "\\ud800": 1\n', "spec", {"spec": {"\ufffd": 1}}),
        ('spec:\n  a: "x\\udfff"\n', "spec.a", {"spec": {"a": "x\ufffd"}}),
        ('spec:\n- ["\\ude00\\ud83d"]\n', "spec[0][0]", {"spec": [["\ufffd\ufffd"]]}),
    ],
)
def test_half_of_a_character_is_a_problem_at_its_field_and_no_text(text: str, path: str, data: object) -> None:
    (document,), _ = read_documents(text)
    assert document.data == data
    assert [(problem.path, problem.line) for problem in document.problems] == [(path, 2)]
    assert ", half of a character; write the whole character" in document.problems[0].message


def test_escapes_of_json_are_one_character() -> None:
    (document,), problems = read_documents('{"a": "\\ud83d\\ude00", "\\ud83d\\ude00": 1}')
    assert (document.data, document.problems, problems) == ({"a": "\U0001f600", "\U0001f600": 1}, [], [])


def test_duplicate_keys_are_reported_with_both_lines() -> None:
    (document,), _ = read_documents("a:\n  b: 1\n  c: 1\n  b: 2\n")
    (problem,) = document.problems
    assert (problem.line, problem.path, problem.message) == (4, "a.b", "is a duplicate (first in line 2); remove one")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a:\n\tb: 1\n", 2, "indented with a tab"),
        ("a: [1, 2\nb: 3\n", 2, "cannot be read"),
        ("a: b: c\n", 1, "mapping values are not allowed"),
        ("x: 1\na: \x01\n", 2, "U+0001"),
    ],
)
def test_invalid_yaml_is_reported_with_its_line(text: str, line: int, message: str) -> None:
    _, (problem,) = read_documents(text)
    assert problem.line == line
    assert message in problem.message


def test_documents_before_a_syntax_error_are_read() -> None:
    documents, problems = read_documents("a: 1\n---\nb: [\n")
    assert [document.data for document in documents] == [{"a": 1}]
    assert len(problems) == 1


def test_recursive_alias_is_reported() -> None:
    _, (problem,) = read_documents("a: &a\n  b: *a\n")
    assert "contains itself" in problem.message


def test_format_path_uses_kubernetes_notation() -> None:
    assert format_path(("spec", "rewards", 0, "name")) == "spec.rewards[0].name"


def test_aliases_and_merge_keys_are_expanded() -> None:
    (document,), problems = read_documents("a: &a {b: 1}\nc:\n  <<: *a\n  d: [*a, *a]\n")
    assert problems == []
    assert document.data["c"] == {"b": 1, "d": [{"b": 1}, {"b": 1}]}


def test_document_that_contains_itself_is_refused() -> None:
    _, (problem,) = read_documents("a: &a [*a]\n")
    assert "contains itself through an alias" in problem.message


LIST = """\
apiVersion: v1
kind: List
items:
- kind: A
  spec: {x: 1}
- kind: B
  spec:
    x: 1
    y: [2]
    x: 3
"""


def test_items_of_a_list_are_documents_with_their_own_paths_and_lines() -> None:
    documents, problems = read_documents(LIST + "---\nkind: C\n")
    assert problems == []
    assert [document.data["kind"] for document in documents] == ["A", "B", "C"]
    first, second, _ = documents
    assert (first.line_of(()), second.line_of(())) == (4, 6)
    assert second.line_of(("spec", "y", 0)) == 9
    assert first.problems == []
    assert [(problem.path, problem.line) for problem in second.problems] == [("spec.x", 10)]


def test_empty_list_has_no_documents_and_a_wrong_entry_is_kept() -> None:
    assert read_documents("kind: List\nitems: []\n") == ([], [])
    (entry,), _ = read_documents("<<: {items: [1]}\nkind: List\n")
    assert entry.line_of(("spec",)) == 1, "the line of the list, if the item has none"
    (entry,), _ = read_documents("kind: List\nitems: [1]\n")
    assert (entry.data, entry.line_of(())) == (1, 2)


def test_list_without_a_list_of_items_stays_whole() -> None:
    (document,), _ = read_documents("kind: List\nitems: 3\n")
    assert document.data == {"kind": "List", "items": 3}
