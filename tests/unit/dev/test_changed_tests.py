"""A change selects the tests that it concerns."""

from pathlib import Path

import grimp
import pytest

from dev.changed_tests import list_imports, name_module, select_tests

TESTS = {
    Path("tests/unit/rljob_api/test_a.py"): {"rljob_api.a"},
    Path("tests/unit/rljob_cli/test_b.py"): {"rljob_cli.b", "tests.support.c"},
    Path("tests/unit/rljob_cli/test_d.py"): {"rljob_cli.d"},
}


@pytest.fixture
def graph():
    """b imports a; d imports b."""
    graph = grimp.ImportGraph()
    graph.add_import(importer="rljob_cli.b", imported="rljob_api.a")
    graph.add_import(importer="rljob_cli.d", imported="rljob_cli.b")
    return graph


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        (
            "api/rljob_api/a.py",
            {"tests/process/rljob_api", "tests/unit/rljob_api/test_a.py", "tests/unit/rljob_cli/test_b.py"},
        ),
        ("tests/unit/rljob_cli/test_d.py", {"tests/unit/rljob_cli/test_d.py"}),
        ("tests/support/c.py", {"tests/unit/rljob_cli/test_b.py"}),
        (
            "docs/install.md",
            {"tests/unit/test_docs.py", "tests/unit/test_docs_pages.py", "tests/unit/dev/test_site.py"},
        ),
        ("charts/rljob/values.yaml", {"tests/process/charts"}),
        ("LICENSE", set()),
    ],
)
def test_select_tests_follows_one_import(graph, changed, selected):
    assert select_tests([Path(changed)], graph, TESTS) == selected


def test_name_module_names_packages_by_their_folder():
    assert name_module(Path("api/rljob_api/wire/__init__.py")) == "rljob_api.wire"
    assert name_module(Path("tests/unit/test_docs.py")) is None


def test_list_imports_includes_imported_modules_and_names(tmp_path):
    (tmp_path / "t.py").write_text("import os.path\nfrom rljob_api.wire import contract\n")
    assert list_imports(tmp_path / "t.py") == {"os.path", "rljob_api.wire", "rljob_api.wire.contract"}
