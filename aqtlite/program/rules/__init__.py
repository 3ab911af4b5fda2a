"""Private: rules, what they select, and what is said of those that select nothing.

`rules` has the rule and the forms it is read from (`rules_json`, and Qwix's by
`rules_qwix`); `matching` decides which contractions it selects, `patterns` compares
paths; `unmatched` and `unseen` find what rules do not reach. Read `rules` first.
"""
