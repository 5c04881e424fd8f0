"""Errors as answers: one status for each class of error, one shape of body."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ...jobs.errors import (
    Conflict,
    DoesNotFit,
    Forbidden,
    InputError,
    LazytrainError,
    NotFound,
    TooMany,
    Unauthorized,
    Unreachable,
)

log = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[LazytrainError], int], ...] = (
    (Unauthorized, 401),
    (Forbidden, 403),
    (NotFound, 404),
    (Conflict, 409),
    (TooMany, 429),
    (Unreachable, 503),
    (DoesNotFit, 422),
    (InputError, 422),
)


def answer(status: int, code: str, message: str, hint: str = "", field: str = "") -> JSONResponse:
    """An error as an answer."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "5"}}.get(status)
    body = {"error": {"code": code, "message": message, "hint": hint, "field": field}}
    return JSONResponse(body, status, headers=headers)


def answer_to(error: LazytrainError) -> JSONResponse:
    """An error of ours as an answer."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    fields = error.to_dict()
    return answer(status, fields["code"], fields["message"], fields["hint"], fields["field"])


def install(app: FastAPI) -> None:
    """Let every error that a route raises become an answer."""
    app.add_exception_handler(LazytrainError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


async def _ours(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, LazytrainError)
    return answer_to(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:])
    return answer(422, "invalid_request", f"{field or 'the request'}: {first['msg']}", field=field)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    response = answer(error.status_code, code, str(error.detail))
    response.headers.update(error.headers or {})
    return response


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return answer(500, "unexpected", "the service failed to answer; its log has the trace")
