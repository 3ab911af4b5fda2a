"""The tag of chat templates around what a model generates, for Jinja.

Jinja imports it by its name: this file needs the package, which is optional.
"""

import jinja2.ext
from jinja2 import nodes, parser


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}``, which stands for what is inside.

    Training finds by it which tokens of a conversation to learn.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # As in transformers, variables that are set inside are not seen outside.
        return nodes.Scope(body, lineno=line)
