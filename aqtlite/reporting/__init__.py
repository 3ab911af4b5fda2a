"""Private: what compiled programs do, for `aqtlite.report`.

A function is traced (`program`) and its contractions found (`traced`); it is compiled,
and the text of the compiled program read (`hlo`) for its products (`products`), copies
and collectives; `joined` tells which products belong to which contraction. Read
`report` first.
"""
