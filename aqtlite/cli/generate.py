"""The command ``aqtlite generate``."""

import argparse
import contextlib
import time
from collections.abc import Iterator

import jax

from aqtlite import kv_cache, llm
from aqtlite.cli import output
from aqtlite.cli.configs import from_file, of_preset
from aqtlite.errors import UserError

_FOR_WEIGHTS = "the weights: quantize them by --preset, or take --dtype bfloat16"
_FOR_TOKENS = "the text's keys and values: lower --max-tokens or --kv-bits"


def run(args: argparse.Namespace) -> None:
    """Runs ``aqtlite generate``."""
    cfg = None
    if args.config is not None:
        cfg = from_file(args.config)
    elif args.preset is not None:
        cfg = of_preset(args.preset, args.fwd_bits)
    bits = None if args.kv_bits == "float" else int(args.kv_bits)
    messages = output.messages()
    with output.errors_in_one_line(ValueError, TypeError, ModuleNotFoundError):
        sampling = llm.Sampling(temperature=args.temperature, top_p=args.top_p)
        tokenizer = (
            llm.load_tokenizer(args.source)
            if args.tokenizer is None
            else llm.load_tokenizer(args.tokenizer, model=args.source)
        )
        if args.chat:
            message = {"role": "user", "content": args.prompt}
            text = llm.load_chat_template(args.source).render([message])
            prompt = tokenizer.encode_rendered(text)
        else:
            prompt = tokenizer.encode(args.prompt)
        if not prompt:
            raise UserError("--prompt has no token: give it a text")
        began = time.perf_counter()
        with _naming_memory(_FOR_WEIGHTS):
            loaded = llm.load(args.source, cfg, dtype=args.dtype)
        read = time.perf_counter()
        with _naming_memory(_FOR_TOKENS):
            generation = llm.compile_generation(
                loaded.decoder,
                len(prompt),
                args.max_tokens,
                cache=None if bits is None else kv_cache.config_for(bits),
                sampling=sampling,
            )
        found = generation.tokens(prompt, args.seed, tokenizer.stop)
    compiled = time.perf_counter()
    messages.print(loaded.summary(), soft_wrap=True)
    messages.print(f"loaded in {read - began:.1f} s, compiled in {compiled - read:.1f}")
    times: list[float] = [time.perf_counter()]
    after: list[int] = []  # An answer begins a text of its own.
    if not args.chat:
        after = prompt
        print(args.prompt, end="", flush=True)
    with _naming_memory(_FOR_TOKENS):
        for piece in tokenizer.decoded(_timed(found, times), after):
            print(piece, end="", flush=True)
    print()
    messages.print(_speed(len(prompt), times))


@contextlib.contextmanager
def _naming_memory(use: str) -> Iterator[None]:
    """Turns the error of too little memory into a `UserError`.

    Args:
        use: what it is for, and how less will do.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(f"there is too little memory for {use}") from error


def _timed(tokens: Iterator[int], times: list[float]) -> Iterator[int]:
    """Notes when each token is known."""
    for token in tokens:
        times.append(time.perf_counter())
        yield token


def _speed(prompt: int, times: list[float]) -> str:
    if len(times) == 1:
        return f"prompt of {prompt} tokens; the text ends there"
    text = f"prompt {prompt} tokens, {prompt / (times[1] - times[0]):.1f} per second"
    steps = len(times) - 2
    if steps:
        speed = steps / (times[-1] - times[1])
        text += f"; generated {steps + 1}, {speed:.1f} per second"
    return text
