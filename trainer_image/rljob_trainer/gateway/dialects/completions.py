"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rljob_trainer.gateway.types import ModelAnswer, ModelRequest


class Completions:
    path = "/v1/completions"
    keep_alive = b": keep-alive\n\n"

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        raise NotImplementedError

    def write(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
        raise NotImplementedError

    def events(self, request: ModelRequest, answer: ModelAnswer) -> Sequence[bytes]:
        raise NotImplementedError

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        raise NotImplementedError

    def error_event(self, status: int, code: str, message: str) -> bytes:
        raise NotImplementedError
