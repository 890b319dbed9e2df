"""HTML pages as tests see them: their elements and text, and what every page must hold to."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

VOID = {"meta", "br", "wbr"}
PAIRS = (("text", "page"), ("text", "card"), ("dim", "page"), ("dim", "card"), ("accent", "page"), ("pass", "page"),
         ("pass", "pass-soft"), ("fail", "page"), ("fail", "fail-soft"), ("open", "page"), ("open", "open-soft"),
         ("text", "pass-soft"), ("text", "fail-soft"), ("text", "open-soft"))  # fmt: skip


class Page(HTMLParser):
    """Collects what a page shows, and checks that its elements nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "title"} & set(self.open):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of every such element."""
        return [attributes for name, attributes in self.tags if name == tag]


def check(html: str) -> Page:
    """Check what holds for every page: it stands alone, and who cannot see it, or has a keyboard alone, can read it."""
    page = Page(html)
    assert not re.search(r"""\ssrc=|url\(|@import|<script""", html)
    assert "default-src 'none'" in html
    assert page.all("html") == [{"lang": "en"}]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in page.all("a"):
        assert (attributes["href"] or "").removeprefix("#") in ids  # nothing outside of the page is linked
    for _, attributes in page.tags:
        assert attributes.get("aria-labelledby") in (None, *ids)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in page.all("svg"))
    assert len(re.findall(r"<svg[^>]*>\s*<title>[^<]", html)) == len(page.all("svg"))
    assert all(head.get("scope") for head in page.all("th"))
    check_drawings(page)
    for colors in re.findall(r":root \{([^}]*--page[^}]*)\}", html):
        found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", colors))
        for text, ground in PAIRS:
            assert contrast(found[text], found[ground]) >= 4.5, (text, ground)  # WCAG 2.2, 1.4.3, level AA
    return page


LENGTHS = ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "dx")


def check_drawings(page: Page) -> None:
    """Check that each length of a drawing is a number, that no size is negative, and that percents lie in the drawing.

    A browser draws nothing, and says nothing, where that is not so.
    """
    for tag, attributes in page.tags:
        if tag in ("svg", "rect", "line", "circle", "text"):
            lengths = {name: attributes[name] or "" for name in LENGTHS if name in attributes}
            for name, written in lengths.items():
                assert re.fullmatch(r"-?\d+(\.\d+)?%?", written), (tag, name, written)
                assert not written.endswith("%") or -0.01 <= float(written[:-1]) <= 100.01, (tag, name, written)
                assert name not in ("width", "height", "r") or float(written.removesuffix("%")) >= 0, (tag, name)
            if tag == "rect" and lengths["x"].endswith("%"):
                assert float(lengths["x"][:-1]) + float(lengths["width"][:-1]) <= 100.02, lengths


def contrast(text: str, ground: str) -> float:
    """Contrast ratio of two colors, "#rrggbb" (WCAG 2.2)."""
    light, dark = sorted((_luminance(text), _luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    shares = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
