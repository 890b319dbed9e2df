"""Pages inside of a notebook."""

from __future__ import annotations

import html

HEIGHT_PX = 720


def framed(page: str) -> str:
    """Put a page of its own into a frame, so that its styles and the notebook's leave each other alone."""
    return (
        f'<iframe srcdoc="{html.escape(page, quote=True)}" sandbox="" '
        f'style="width: 100%; height: {HEIGHT_PX}px; border: 1px solid #8884; border-radius: 4px"></iframe>'
    )
