"""Private: serving programs that are compiled once, with packed variables.

`packed` lays variables out as the call reads them, `merged` joins small ones, and
`undivided` runs small loops on one thread. Read `compile_serving` first.
"""
