"""Signing in with a token, and out."""

from __future__ import annotations

from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ...jobs.errors import LazytrainError, TooMany, Unauthorized
from ..web import Visit, open_page
from ..web.visit import answer, theme_of

_LONGEST_TOKEN = 500


def sign_in(visit: Visit) -> Response:
    """Ask for a token; a right one opens a session and leads to where the person wanted to go."""
    then = _our_page(visit.form.get("next") or visit.asked("next"))
    if visit.request.method != "POST":
        return _form(visit, then, None)
    token = visit.form.get("token", "").strip()
    try:
        if not token or len(token) > _LONGEST_TOKEN or not token.isascii() or not token.isprintable():
            raise Unauthorized("that is no token")
        visit.state.client_for(token).me()
    except LazytrainError as error:
        return _form(visit, then, error)
    response = RedirectResponse(then, status_code=303)
    response.set_cookie(
        visit.state.cookie,
        visit.state.sessions.begin(token),
        httponly=True,
        samesite="strict",
        secure=visit.state.secure,
        path="/",
    )
    return response


def sign_out(visit: Visit) -> Response:
    """End the session."""
    visit.state.sessions.end(visit.request.cookies.get(visit.state.cookie, ""))
    response = RedirectResponse("/login", status_code=303)
    response.delete_cookie(visit.state.cookie, path="/")
    return response


def _form(visit: Visit, then: str, error: LazytrainError | None) -> Response:
    wrong = isinstance(error, Unauthorized)
    words = "This token is not valid." if wrong else error.message if error else ""
    status = 401 if wrong else 429 if isinstance(error, TooMany) else 503 if error else 200
    context = {"user": None, "theme": theme_of(visit.request), "path": "/login", "then": then, "error": words}
    return answer(visit.request, "login.html", "", status, context)


def _our_page(path: str) -> str:
    """Where to go after signing in: a path of ours, and nothing that a browser would read as another host."""
    ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() and "\\" not in path
    return path if ours else "/"


routes = [
    Route("/login", open_page(sign_in), methods=["GET", "POST"]),
    Route("/logout", open_page(sign_out), methods=["POST"]),
]
