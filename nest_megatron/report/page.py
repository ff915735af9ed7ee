"""HTML pages from Jinja2 templates: every value is escaped, and a missing one is an error."""

from __future__ import annotations

from nest_megatron.files import MARK
from nest_megatron.units import format_chance, format_gib, format_seconds

_PACKAGE = "nest_megatron.report"


def render_page(template: str, title: str, *, package: str = _PACKAGE, **values: object) -> str:
    """One self-contained page: no script, nothing fetched from anywhere.

    Args:
        template: a file in the folder ``templates`` of a package.
        package: that has the template; the base of all pages and its macros are found anyway.
        values: what the template shows; markup only where it is ``markupsafe.Markup``.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    packages = dict.fromkeys((package, _PACKAGE))
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    words = {"time": format_seconds, "gib": format_gib, "chance": format_chance}
    environment.filters |= {**words, "zip": zip}
    page = environment.get_template(template)
    return page.render(generator=MARK, title=title, **values) + "\n"
