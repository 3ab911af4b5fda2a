"""Private: tables and plots for people, of plain figures; and paths of files.

`tables` lays out text for terminals and HTML for notebooks, `rich_tables` the same by
rich, `plots` draws by Matplotlib, and `local_paths` refuses addresses as paths of
files. Nothing of quantization is known here. Read `tables` first.
"""
