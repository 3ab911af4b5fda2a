"""Chat templates: from the messages of a conversation to the text of a prompt."""

import dataclasses
import datetime
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from aqtlite import extras
from aqtlite.checkpoint import CheckpointError, load_quantized
from aqtlite.checkpoint.quantized_formats.settings import read_json
from aqtlite.llm import gguf_tokenizer

_LARGEST = 1 << 20
"""Bytes of a template; those with tools have some ten thousand."""

_GENERATION_TAG = "aqtlite.llm.generation_tag.GenerationTag"

_OF_PYTHON = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
)
"""What a template may raise in a language that is Python's in small."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template in the language of Jinja, which sets the marks around messages.

    A template is a program from a file: it runs in Jinja's immutable sandbox, in which
    it reaches no attribute of Python's and no file, but may take its time.

    >>> template = ChatTemplate(
    ...     "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    ...     "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    ...     {"bos_token": "<s>"},
    ...     "a docstring",
    ... )
    >>> template.render([{"role": "user", "content": "Hello"}])
    '<s><user>Hello<assistant>'
    """

    text: str
    special_tokens: Mapping[str, str]
    """Names that the template may use, such as "bos_token"."""
    where: str
    """Name of the file, for messages."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that asks a model for the message after some.

        It contains the marks at the beginning: `Tokenizer.encode_rendered` adds none.

        Args:
            messages: each with a "role", such as "system", "user" or "assistant", and
                its "content".

        Raises:
            ModuleNotFoundError: if the package jinja2 is not installed.
            CheckpointError: if the template is damaged, or refuses the messages, as
                some do those of a system.
        """
        jinja2 = extras.package("jinja2")
        sandbox = extras.package("jinja2.sandbox")
        # As transformers sets it up, which templates are written for.
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GENERATION_TAG],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["strftime_now"] = _now

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = refuse
        try:
            text: str = environment.from_string(self.text).render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, *_OF_PYTHON) as error:
            raise CheckpointError(
                f"the chat template of {self.where} fails: "
                f"{type(error).__name__}: {error}"
            ) from error
        return text


def load_chat_template(path: str | os.PathLike) -> ChatTemplate:
    """Reads the chat template of a checkpoint.

    Args:
        path: a folder or file of Hugging Face, with ``chat_template.jinja`` or a
            ``tokenizer_config.json`` that holds a template beside it; or a GGUF file.

    Raises:
        CheckpointError: if there is none, or it is no text.
    """
    path = pathlib.Path(path)
    if path.suffix == ".gguf":
        return _of_gguf(load_quantized(path).metadata, str(path))
    folder = path if path.is_dir() else path.parent
    settings = folder / "tokenizer_config.json"
    values = read_json(settings) if settings.is_file() else {}
    own = folder / "chat_template.jinja"
    where, found = settings, values.get("chat_template")
    if own.is_file():
        if own.stat().st_size > _LARGEST:
            raise CheckpointError(f"{own} is no template: it has over {_LARGEST} bytes")
        where, found = own, own.read_text("utf-8", errors="replace")
    elif isinstance(found, list):
        found = _default(found)
    if found is None:
        raise CheckpointError(
            f"{folder} has no chat template, neither chat_template.jinja nor one in "
            "tokenizer_config.json: its model may not be trained to answer. Leave "
            "--chat out to continue the prompt as it is"
        )
    return _checked(found, _special_tokens(values), str(where))


def _default(found: list[Any]) -> Any:
    """The template of several that is meant for conversations without tools."""
    for one in found:
        if isinstance(one, dict) and one.get("name") == "default":
            return one.get("template")
    return None


def _special_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that a tokenizer's config names, written as text or as an object."""
    found = {}
    for name, value in values.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _of_gguf(metadata: Mapping[str, Any], where: str) -> ChatTemplate:
    found = metadata.get("tokenizer.chat_template")
    if found is None:
        raise CheckpointError(
            f"{where} has no chat template (tokenizer.chat_template). Leave --chat out "
            "to continue the prompt as it is"
        )
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    special = {}
    for name in ("bos", "eos", "unknown", "padding"):
        number = gguf_tokenizer.number_of(metadata, name, where)
        if number is not None and 0 <= number < len(tokens):
            special[f"{name}_token"] = str(tokens[number])
    return _checked(found, special, where)


def _checked(found: Any, special: dict[str, str], where: str) -> ChatTemplate:
    if not isinstance(found, str) or len(found) > _LARGEST:
        kind = type(found).__name__
        raise CheckpointError(
            f"the chat template of {where} has to be a text of at most {_LARGEST} "
            f"characters, got {kind}"
        )
    return ChatTemplate(found, special, where)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: Jinja's own filter escapes marks of HTML."""
    return json.dumps(
        x,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
