"""HTML pages from Jinja2 templates: every value is escaped, and a missing one is an error."""

from __future__ import annotations

import base64
import hashlib

from nest_megatron.files import MARK
from nest_megatron.printing import cleaned
from nest_megatron.report.charts import MEMORY_COLOURS, OTHER_COLOUR, TERM_COLOURS, ink_on
from nest_megatron.report.words import MEMORY_WORDS, TERM_WORDS
from nest_megatron.units import GIB, format_chance, format_gib, format_seconds

_PACKAGE = "nest_megatron.report"


def render_page(
    template: str, title: str, *, package: str = _PACKAGE, script: str = "", **values: object
) -> str:
    """One self-contained page: nothing is fetched, and no script runs but one of ours.

    Args:
        template: a file in the folder ``templates`` of a package.
        package: that has the template; the base of all pages and its macros are found anyway.
        script: a file beside the base; the page's policy allows it by its hash.
        values: what the template shows; markup only where it is ``markupsafe.Markup``.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def _without_marks(value: object) -> object:
        if isinstance(value, Markup):
            return Markup(cleaned(value))
        return cleaned(value) if isinstance(value, str) else value

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(_PACKAGE)]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_marks,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "time": format_seconds,
        "gib": format_gib,
        "gib2": lambda num_bytes: f"{num_bytes / GIB:.2f} GiB",
        "chance": format_chance,
        "zip": zip,
        "ink": ink_on,
    }
    environment.globals |= {
        "colours": {"terms": TERM_COLOURS, "memory": MEMORY_COLOURS, "other": OTHER_COLOUR},
        "names": {"terms": TERM_WORDS, "memory": MEMORY_WORDS},
    }
    page = environment.get_template(template)
    code = environment.get_template(script).render() if script else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = f"; script-src 'sha256-{digest}'" if code else ""
    own = {"script": Markup(code), "policy": Markup(policy)}
    return page.render(generator=MARK, title=title, **own, **values) + "\n"
