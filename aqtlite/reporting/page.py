"""A report as one page of HTML that needs nothing else: `Report.to_html`."""

import html
import json
import os
import pathlib
from typing import Any

from aqtlite.reporting import page_script, page_style, tables

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
<h1>{title}</h1>
<p class="sub">{lines}</p>
<noscript><pre>{text}</pre></noscript>
<div class="plots">
<figure><figcaption>Share of the work by dtype</figcaption>
<svg id="shares" role="img" aria-label="share of the work by dtype"></svg></figure>
<figure><figcaption>Bits of each contraction, in program order</figcaption>
<svg id="bits" role="img" aria-label="bits of each contraction"></svg></figure>
<figure id="of-memory"><figcaption>Memory of the program</figcaption>
<svg id="memory" role="img" aria-label="memory of the program"></svg></figure>
</div>
<div class="controls">
<input id="filter" type="search" placeholder="Filter: path, dtype, role"
 aria-label="filter">
<label><input id="float" type="checkbox"> only in float</label>
<label><input id="fold" type="checkbox" checked> fold by module</label>
</div>
<div class="wide"><table id="contractions"><thead></thead><tbody></tbody></table></div>
<section id="more"></section>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</html>
"""


def write(report: Any, path: str | os.PathLike[str]) -> None:
    """Writes the page of a report.

    Args:
        report: a `Report`.
        path: path of the file.

    Raises:
        OSError: if the file cannot be written.
    """
    pathlib.Path(path).write_text(text_of(report), encoding="utf-8")


def text_of(report: Any) -> str:
    """Returns the page of a report."""
    data = report.to_dict()
    for row, one in zip(data["contractions"], report.contractions, strict=True):
        row["notes"] = tables.notes(one)
    # A path may hold anything; "</script>" in it must not end the script.
    as_json = json.dumps(data).replace("<", "\\u003c")
    lines = tables.summary(report)
    return _PAGE.format(
        title=html.escape(tables.title(report)),
        lines=html.escape(" · ".join(lines[:2])),
        text=html.escape(tables.as_text(report)),
        style=page_style.STYLE,
        script=page_script.SCRIPT,
        data=as_json,
    )
