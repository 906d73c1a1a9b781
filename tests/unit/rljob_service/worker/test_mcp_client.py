"""Tools of an MCP server, without a server: what is wrong before the session begins, and what a result says."""

from types import SimpleNamespace

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.services.tool import MCP_MODULE
from rljob_service.worker import mcp_client
from rljob_service.worker.mcp_client import McpTools


def test_the_manifest_names_this_module():
    assert mcp_client.__name__ == MCP_MODULE


def test_a_missing_program_is_an_error_of_the_user():
    with pytest.raises(UserError, match=r"mcp.command: no-such-server was not found; add its package to"):
        McpTools(command=["no-such-server"])


@pytest.mark.parametrize(
    ("value", "problem"),
    [("Bearer ${NO_SUCH_KEY}", "the variable 'NO_SUCH_KEY' is not set"), ("5$", r"must have variables as \${NAME}")],
)
def test_headers_that_cannot_be_filled_in_are_an_error_of_the_user(value, problem):
    with pytest.raises(UserError, match=f"mcp.headers.authorization: {problem}"):
        McpTools(url="http://127.0.0.1:1/mcp", headers={"authorization": value})


def test_headers_get_variables(monkeypatch):
    monkeypatch.setenv("KEY", "k7")
    assert mcp_client._fill_in({"a": "Bearer ${KEY}", "b": "$$5"}) == {"a": "Bearer k7", "b": "$5"}


def test_text_of_a_result():
    def read(*parts, structured=None):
        content = [SimpleNamespace(type=kind, **({"text": text} if text else {})) for kind, text in parts]
        return mcp_client._read_content(SimpleNamespace(content=content, structured_content=structured))

    assert read(("text", "a"), ("image", ""), ("text", "b")) == "a\n[image]\nb"
    assert read(structured={"a": "ä"}) == '{"a": "ä"}'
    assert read(("text", "4"), structured={"result": 4}) == "4"
    assert read() == ""


def test_the_cause_of_an_error_is_shown_without_its_groups():
    error = ExceptionGroup("unhandled", [ExceptionGroup("unhandled", [OSError("refused")])])
    assert mcp_client._describe(error) == "OSError: refused"
