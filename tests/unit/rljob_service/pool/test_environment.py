"""What of a server's environment a function sees."""

from __future__ import annotations

from rljob_service.pool.environment import build_environment

SHELL = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "LC_ALL": "C.UTF-8",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "secret",
    "OPENAI_API_KEY": "secret",
    "RLJOB_TOKEN": "secret",
    "TMPDIR": "/var/tmp",
}


def build(**more: str) -> dict[str, str]:
    return build_environment(SHELL | more, "/scratch")


def test_function_sees_a_fixed_list_and_its_scratch_directory() -> None:
    environment = build()
    assert "secret" not in environment.values()
    assert {name: environment[name] for name in ("PATH", "LC_ALL")} == {"PATH": "/bin", "LC_ALL": "C.UTF-8"}
    assert environment["HOME"] == environment["TMPDIR"] == "/scratch"
    assert environment["HF_HOME"] == "/home/me/.cache/huggingface"
    assert environment["OMP_NUM_THREADS"] == "1"


def test_function_sees_what_the_job_names_but_no_variable_of_rljob() -> None:
    environment = build(RLJOB_CONTAINER_ENV="OPENAI_API_KEY RLJOB_TOKEN OMP_NUM_THREADS", OMP_NUM_THREADS="4")
    assert environment["OPENAI_API_KEY"] == "secret"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert [name for name in environment if name.startswith("RLJOB_")] == []
    assert "HF_TOKEN" not in environment


def test_environment_of_a_container_is_passed_as_it_is() -> None:
    environment = build(RLJOB_CONTAINER_ENV="*", NLTK_DATA="/data")
    assert environment["NLTK_DATA"] == "/data"
    assert "RLJOB_TOKEN" not in environment
