"""Private: configs as JSON.

`serialization` writes and reads configs, `registry` knows the classes that they may
contain, and `json_text` lays JSON out for people. Read `serialization` first.
"""
