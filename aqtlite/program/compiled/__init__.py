"""Private: serving programs that are compiled once, with packed variables.

`packed` lays variables out as the call reads them, `rounded_rows` has products round
their rows, `merged` joins small variables, and `undivided` runs small loops on one
thread. Read `compile_serving` first.
"""
