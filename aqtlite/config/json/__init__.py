"""Private: configs as JSON.

`serialization` writes and reads configs, `registry` knows the classes that they may
contain, and `json_text` reads untrusted text. Read `serialization` first.
"""
