"""The arguments of ``aqtlite generate``."""

import argparse
from collections.abc import Callable

from aqtlite.cli import shared_options

DESCRIPTION = """\
Continue a text with a language model, and print it as it is computed.

MODEL is a folder of Hugging Face, with config.json, tokenizer.json and
.safetensors files, or a GGUF file: of the Llama, Mistral, Qwen 2 and 3, Gemma
1 and 3, and GPT-2 families, in float or quantized as
aqtlite.checkpoint.load_quantized reads it. The prompt is continued as it is;
with --chat it is a user's message, which the chat template of the model marks
as such, and only the answer is printed.

Integers of a quantized file are used as they are. With --preset or --config,
float weights become integers as they are loaded, one after the other, and
activations are quantized as it says. Keys and values of past positions are
integers of --kv-bits.

Text goes to standard output; to standard error, what became of the weights,
and the tokens per second: of the prompt, and of what was generated.
"""

EXAMPLES = """\
  aqtlite generate Qwen3-0.6B --prompt 'The capital of France is'
  aqtlite generate Qwen3-0.6B --preset weight_only --fwd-bits 4 --prompt Once
  aqtlite generate Qwen3-0.6B --chat --prompt 'What is the capital of France?'
  aqtlite generate model-Q8_0.gguf --prompt Once --max-tokens 100 \\
    --temperature 0.7 --top-p 0.9
"""

KV_BITS = ("8", "4", "3", "float")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``aqtlite generate``."""
    shared_options.add_path(parser, "source", metavar="MODEL")
    parser.add_argument_group("required options").add_argument(
        "--prompt", metavar="TEXT", required=True, help="the beginning of the text"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="answer the prompt, by the model's chat template (chat_template.jinja, "
        "tokenizer_config.json or a GGUF file's)",
    )
    shared_options.add_one_config(parser, "for the weights")
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=_integer(1, 2**31 - 1),
        default=64,
        help="largest number of tokens after the prompt (default %(default)s)",
    )
    parser.add_argument(
        "--kv-bits",
        choices=KV_BITS,
        default="8",
        help="bits of keys and values of past positions (default %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.0,
        help="divide logits by this and sample; 0, the default, takes the likeliest",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that have this probability together",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=_integer(0, 2**32 - 1),
        default=0,
        help="seed of the sampling",
    )
    shared_options.add_path(
        parser,
        "--tokenizer",
        metavar="FILE",
        help="a tokenizer.json, if MODEL has none or one that is not read",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of activations and float weights (default %(default)s)",
    )


def _integer(least: int, most: int) -> Callable[[str], int]:
    """Makes the `type` of an argument that is an integer in a range."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no integer between {least} and {most}"
            )
        return number

    return read
