"""The style of the page of a report, light and dark, from 400 pixels on."""

STYLE = """
:root { --back: #fff; --text: #1c1e21; --dim: #606770; --line: #d8dce2;
  --soft: #f4f6f8; --narrow: #2a7de1; --mid: #7b61c4; --float: #d9622b;
  --none: #9aa3ad; color-scheme: light dark }
@media (prefers-color-scheme: dark) { :root { --back: #16181c; --text: #e6e8eb;
  --dim: #9aa3ad; --line: #343a42; --soft: #1f2329; --narrow: #5aa2f5;
  --mid: #a48df0; --float: #f08a55; --none: #6c757f } }
* { box-sizing: border-box }
body { background: var(--back); color: var(--text); margin: 0 auto; padding: 16px;
  max-width: 1400px; font: 15px/1.45 system-ui, sans-serif }
h1 { font-size: 1.35em; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.05em; margin: 1.4em 0 .3em }
.sub { color: var(--dim); margin: .2em 0 1em }
.plots { display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)) }
figure { margin: 0; padding: 10px; border: 1px solid var(--line);
  border-radius: 6px; min-width: 0 }
figcaption { font-size: .87em; color: var(--dim); margin-bottom: 6px }
svg { width: 100%; display: block }
svg text { fill: var(--text); font: 12px system-ui, sans-serif }
.narrow { fill: var(--narrow) } .mid { fill: var(--mid) }
.float { fill: var(--float) } .none { fill: var(--none) }
.axis { stroke: var(--line) } .grid { stroke: var(--text) }
#histograms { margin-top: 12px;
  grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)) }
.controls { display: flex; flex-wrap: wrap; gap: 8px 18px; align-items: center;
  margin: 16px 0 8px }
input[type=search] { flex: 1 1 220px; padding: 7px 9px; font: inherit;
  color: inherit; background: var(--soft); border: 1px solid var(--line);
  border-radius: 6px }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-size: .87em }
th, td { text-align: left; padding: 5px 8px; border-bottom: 1px solid var(--line);
  vertical-align: top }
th button { font: inherit; font-weight: 600; color: inherit; background: none;
  border: 0; padding: 0; cursor: pointer; white-space: nowrap }
td.number { text-align: right; font-variant-numeric: tabular-nums }
td.path { overflow-wrap: anywhere; min-width: 130px }
tr.module { background: var(--soft); font-weight: 600 }
tr.module button { font: inherit; color: inherit; background: none; border: 0;
  padding: 0; cursor: pointer; text-align: left }
.tag { border-radius: 4px; padding: 0 6px; color: #fff; white-space: nowrap }
.tag.narrow { background: var(--narrow) } .tag.mid { background: var(--mid) }
.tag.float { background: var(--float) } .tag.none { background: var(--none) }
li { overflow-wrap: anywhere }
"""
