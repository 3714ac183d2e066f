"""The page: one self-contained HTML file that loads nothing from elsewhere.

Jinja2 fills the template with autoescape on; output of a model and text enter the page only as
JSON, and the script writes them as text, never as markup. The content security policy of the page
allows its own script and style, by their checksums, and no others.
"""

import base64
import hashlib
import importlib.resources
from typing import Any

MOST_CHARACTERS = 20_000
"""Maximum length of a text typed into the page."""


def render(data: dict[str, Any], *, live: bool = False) -> str:
    """The page as HTML.

    Args:
        data: the output of ``look``.
        live: whether there is a server that reads typed text.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise ValueError(
            "the page needs Jinja2, which is not installed: pip install 'kalman_attention[report]'"
        ) from error
    from markupsafe import Markup

    style, script = _file("style.css"), _file("script.js")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_file("page.html")).render(
        title=f"{data['title']} - kla explore",
        style=Markup(style),
        script=Markup(script),
        policy=policy(style, script, live=live),
        data=data,
        live=live,
        most=MOST_CHARACTERS,
    )


def policy(style: str, script: str, *, live: bool) -> str:
    """The content security policy: allow these two, and requests to this server if there is one."""
    allowed = {
        "default-src": "'none'",
        "style-src": _checksum(style),
        "script-src": _checksum(script),
        "img-src": "data:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in allowed.items())


def _checksum(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
