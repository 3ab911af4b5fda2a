"""Private: tables and plots for people, of plain figures.

`tables` lays out text for terminals and HTML for notebooks, `rich_tables` the same by
rich, and `plots` draws by Matplotlib. Nothing of quantization is known here. Read
`tables` first.
"""
