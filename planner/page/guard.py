"""What every request must satisfy, and the headers of every response.

The server listens on 127.0.0.1 only. Other programs of the machine, and pages of other sites in the
same browser, are kept out: by a token, by the ``Host`` header (a foreign name that resolves to
127.0.0.1 is refused: DNS rebinding), by ``Origin`` and ``Sec-Fetch-Site``. Requests only read: no
method but GET and HEAD, and no body.
"""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.page.question import MAX_QUERY

SECURITY: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
TOKEN: Final = "token"  # the name of its field in the first address
NO_TOKEN: Final = "open the address with the token that shardplan serve has printed"
MOST_QUERY: Final = MAX_QUERY + 200  # with a token


class Guard:
    """ASGI application that answers for another one where a request is refused."""

    def __init__(self, app: ASGIApp, *, port: int, token: str) -> None:
        self.app, self.token = app, token
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self.cookie = f"shardplan-{port}"  # cookies do not know ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no other protocol is spoken

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    headers[name] = value
            await send(message)

        answer = self.refusal(scope) or self.entrance(scope) or self.app
        await answer(scope, receive, send_guarded)

    def refusal(self, scope: Scope) -> Response | None:
        """Return the response to a request that is refused whoever sends it."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only GET and HEAD", 405, {"Allow": "GET, HEAD"})
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return PlainTextResponse("this name is not served", 421)
        origins = headers.getlist("origin")
        if any(origin != f"http://{hosts[0].lower()}" for origin in origins):
            return PlainTextResponse("requests of other sites are refused", 403)
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if foreign and headers.get("sec-fetch-mode") != "navigate":  # a link may lead here
            return PlainTextResponse("requests of other sites are refused", 403)
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return PlainTextResponse("no body is read", 413)
        if len(scope["query_string"]) > MOST_QUERY:
            return PlainTextResponse(f"the address is too long (at most {MOST_QUERY:,})", 414)
        return None

    def entrance(self, scope: Scope) -> Response | None:
        """Return the response to a request without the cookie: the way in, or a refusal.

        The token of the first address becomes a cookie, and the address goes on without it, so that
        it can be passed on.
        """
        pairs = parse_qsl(scope["query_string"].decode("latin-1"))
        given = [value for name, value in pairs if name == TOKEN]
        if not given and self._is_token(self._cookie(scope)):
            return None
        if len(given) != 1 or not self._is_token(given[0]):
            return PlainTextResponse(NO_TOKEN, 403)
        rest = urlencode([(name, value) for name, value in pairs if name != TOKEN])
        path = "/" + scope["path"].lstrip("/")  # "//host" would lead away
        response = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
        response.set_cookie(self.cookie, self.token, httponly=True, samesite="lax", path="/")
        return response

    def _cookie(self, scope: Scope) -> str:
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(Headers(scope=scope).get("cookie", ""))
        except CookieError:
            return ""
        found = cookies.get(self.cookie)
        return "" if found is None else found.value

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.token.encode())
