"""A report as one page of HTML that needs nothing else: `Report.to_html`."""

import dataclasses
import html
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from aqtlite import errors
from aqtlite.output import files, rich_tables
from aqtlite.reporting import histogram, page_script, page_style, tables

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
<figure id="of-errors"><figcaption>Signal-to-noise ratio over layers, in dB</figcaption>
<svg id="errors" role="img" aria-label="signal-to-noise over layers"></svg></figure>
</div>
<div id="histograms" class="plots"></div>
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


def write(
    report: Any,
    path: str | os.PathLike[str],
    taps: Any,
    operands: Mapping[str, tuple[Any, Any]],
) -> None:
    """Writes the page of a report.

    Args:
        report: a `Report`.
        path: path of the file.
        taps: `aqtlite.Taps`, whose errors to draw; None draws none.
        operands: floats and a `QTensor` of operands to draw, by name.

    Raises:
        OSError: if the file cannot be written.
        TypeError: if an operand is not given with its `QTensor`, or `taps` are others.
        ValueError: if the path is none of a file, the shapes of both differ, or nothing
            is finite.
    """
    files.check_target(path)
    if taps is not None and not hasattr(taps, "operands"):
        raise TypeError(
            "taps must be those of one call of aqtlite.tap or "
            f"aqtlite.tap_against_float, got {errors.brief(taps)}"
        )
    for name, pair in operands.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"the operand {name!r} needs its floats and a QTensor, got "
                f"{errors.brief(pair)}"
            )
    histograms = [histogram.of(name, *pair) for name, pair in operands.items()]
    text = _text(report, [] if taps is None else _errors(taps), histograms)
    files.write(text.encode(), path)


def _errors(taps: Any) -> list[dict[str, Any]]:
    """Returns the lowest signal-to-noise ratio of each contraction, or operand."""
    found = [(x.path, x.contraction, x.snr) for x in taps.results]
    found = found or [(x.path, x.operand, x.snr) for x in taps.operands]
    lowest = [
        (f"{errors.label(path)} {of}", np.asarray(snr, np.float32).ravel())
        for path, of, snr in found
    ]
    return [
        {"name": name, "snr": float(np.min(snr[np.isfinite(snr)]))}
        for name, snr in lowest
        if np.isfinite(snr).any()
    ]


def _text(
    report: Any, errors: list[dict[str, Any]], histograms: list[histogram.Histogram]
) -> str:
    data = report.to_dict()
    data["errors"] = errors
    data["histograms"] = [dataclasses.asdict(one) for one in histograms]
    for row, one in zip(data["contractions"], report.contractions, strict=True):
        row["notes"] = tables.notes(one)
    # A path may hold anything; "</script>" in it must not end the script.
    as_json = json.dumps(data).replace("<", "\\u003c")
    lines = tables.summary(report)
    return _PAGE.format(
        title=html.escape(tables.title(report)),
        lines=html.escape(" · ".join(lines[:2])),
        text=html.escape(rich_tables.as_text(report)),
        style=page_style.STYLE,
        script=page_script.SCRIPT,
        data=as_json,
    )
