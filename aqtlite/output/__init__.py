"""Private: tables and plots for people, of plain figures; and files.

`tables` lays out text for terminals and HTML for notebooks, `rich_tables` the same by
rich, `plots` draws by Matplotlib, `local_paths` refuses addresses as paths of files,
and `files` replaces them in one step. Nothing of quantization is known here. Read
`tables` first.
"""
