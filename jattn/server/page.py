"""`GET /`: a page for a browser, to chat with the model and to watch the server. It is one file, and loads no other."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

_PAGE = files("jattn.server").joinpath("page.html").read_bytes()
_POLICY = (  # what the page may load: nothing, but answers of the server that it came from
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def page(request: Request) -> Response:
    headers = {"content-security-policy": _POLICY, "cache-control": "no-cache", "referrer-policy": "no-referrer"}
    return Response(_PAGE, media_type="text/html", headers=headers)
