"""The page over HTTP, for this machine alone: loopback only, and a secret in the address.

A request is answered only if its path begins with the secret, its Host is this server's own (another host name that
leads here belongs to a page that is not ours), and its Origin, if it has one, is the same.
"""

import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any, Literal

import msgspec

from bapipe.errors import BapipeError
from bapipe.explorer.analyses import Analyses
from bapipe.explorer.answers import Json
from bapipe.explorer.document import live_page, standalone_page
from bapipe.explorer.session import Session
from bapipe.explorer.state import MAX_SHOWN_DEVICES, State
from bapipe.formats.codec import encode
from bapipe.formats.strict_json import decode_json
from bapipe.units import Positive

HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 4 * 2**20

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Judge(msgspec.Struct, forbid_unknown_fields=True):
    """A request to simulate a state; `detailed` is left out while a cut is dragged."""

    state: State
    detailed: bool = True


class Stages(msgspec.Struct, forbid_unknown_fields=True):
    """A request for a number of stages, None for as many as devices and layers allow."""

    state: State
    num_stages: Positive | None = None


class Begin(msgspec.Struct, forbid_unknown_fields=True):
    """A request for the best plan, the Pareto front, a what-if curve over an axis, or an explanation."""

    state: State
    kind: Literal["best", "front", "sweep", "explain"]
    schedules: tuple[str, ...]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=10**6)] = 20.0
    axis: str = ""


class Compare(msgspec.Struct, forbid_unknown_fields=True):
    """A request for the differences of two states."""

    before: State
    after: State


class Layers(msgspec.Struct, forbid_unknown_fields=True):
    """A request for the layers at a micro-batch size."""

    microbatch_size: int


class Export(msgspec.Struct, forbid_unknown_fields=True):
    """A request for a file: the plan, its cluster, or the page with the plans that were tried."""

    state: State
    kind: Literal["plan", "cluster", "html"]
    tried: tuple[tuple[str, State], ...] = ()


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """A request without content."""


class Routes:
    """What the page can ask for, by the last part of the path."""

    def __init__(self, session: Session) -> None:
        self._session, self._analyses = session, Analyses(session)
        self._routes: dict[str, tuple[type[Any], Callable[[Any], object]]] = {
            "model": (Nothing, lambda _: session.model()),
            "judge": (Judge, lambda r: session.judge(r.state, detailed=r.detailed)),
            "layers": (Layers, lambda r: session.layers(r.microbatch_size)),
            "sizes": (Judge, lambda r: session.sizes(r.state)),
            "stages": (Stages, lambda r: msgspec.to_builtins(session.default_devices(r.state, r.num_stages))),
            "compare": (Compare, lambda r: session.changes(r.before, r.after)),
            "begin": (Begin, self._begin),
            "status": (Nothing, lambda _: self._analyses.background.status()),
            "stop": (Nothing, lambda _: self._analyses.background.stop()),
            "export": (Export, self._export),
        }

    def answer(self, name: str, body: bytes) -> object | None:
        """Returns the answer to a request, None if there is no such request; errors of the user are answers, too."""
        if name not in self._routes:
            return None
        kind, function = self._routes[name]
        try:
            found = function(decode_json(body or b"{}", kind))
        except BapipeError as error:
            return {"error": str(error).replace("`", "")}
        return {} if found is None else found

    def _begin(self, request: Begin) -> None:
        analyses = self._analyses
        begin: dict[str, Callable[[State, tuple[str, ...], float], None]] = {
            "best": analyses.best,
            "front": analyses.front,
            "sweep": partial(analyses.sweep, request.axis),
            "explain": analyses.explain,
        }
        begin[request.kind](request.state, request.schedules, request.seconds)

    def _export(self, request: Export) -> Json:
        session, state = self._session, request.state
        if request.kind == "html":
            tried = request.tried or (("", state),)
            return {"name": "plan.html", "text": standalone_page(session, state, tried, self._analyses.kept).decode()}
        made = session.plan(state)
        file = made if request.kind == "plan" else made.cluster
        return {"name": f"{request.kind}.json", "text": encode(file).decode()}


def check_port(port: int) -> None:
    """Raises BapipeError if no page could be at a port of this machine, before work whose result it is to show."""
    with _listening_on(port), socket.create_server((HOST, port)):
        pass


@contextmanager
def _listening_on(port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno or 0)  # `error.strerror` may name the address, too
        raise BapipeError(f"port {port}: {reason}; leave `port` out for a free one") from None


class Server(ThreadingHTTPServer):
    """A server of one session's page; `address` is where a browser finds it.

    Raises:
        BapipeError: more devices than the page shows, or a port that is not free.
    """

    daemon_threads = True

    def __init__(self, session: Session, port: int = 0) -> None:
        if len(session.cluster.devices) > MAX_SHOWN_DEVICES:
            raise BapipeError(
                f"{len(session.cluster.devices):,} devices: the page shows at most {MAX_SHOWN_DEVICES}; explore some "
                "of them, by `num_devices` or `cluster`, or all by `vary`; bapipe show with `html` draws a plan for "
                "them"
            )
        self.secret = secrets.token_urlsafe(16)
        self.routes = Routes(session)
        self.page = live_page(session.profile.model)
        with _listening_on(port):
            super().__init__((HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints what went wrong with a request, unless the page was closed before it had its answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The values of the Host header that lead here."""
        return f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.secret}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        if self._refuses():
            return
        if self._name() == "":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        else:
            self._send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        if self._refuses():
            return
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_REQUEST_BYTES:
            self._send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        if self.headers.get_content_type() != "application/json":  # a form of another page cannot send this type
            self._send_error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
            return
        found = self.server.routes.answer(self._name() or "", self.rfile.read(int(length)))
        if found is None:
            self._send_error(HTTPStatus.NOT_FOUND)
        else:
            self._send(HTTPStatus.OK, "application/json", msgspec.json.encode(found))

    def _name(self) -> str | None:
        """Returns the path behind the secret; None without the secret."""
        first, slash, name = self.path.removeprefix("/").partition("/")
        return name if slash and secrets.compare_digest(first.encode(), self.server.secret.encode()) else None

    def _refuses(self) -> bool:
        """Answers a request that is not from the page of this server, and returns whether it did."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        is_ours = host in self.server.hosts and origin in (None, f"http://{host}")
        if is_ours and self._name() is not None:
            return False
        self._send_error(HTTPStatus.FORBIDDEN)
        return True

    def _send_error(self, status: HTTPStatus) -> None:
        self.close_connection = True  # the request's body was not read
        self._send(status, "text/plain; charset=utf-8", status.phrase.encode())

    def _send(self, status: HTTPStatus, content_type: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in (HEADERS | {"Content-Type": content_type, "Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Requests are not logged: they would hide what the command prints."""
