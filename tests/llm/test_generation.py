"""Generation: from tokens to tokens, from a text to a text, and the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aqtlite import __main__ as program
from aqtlite import llm
from aqtlite.checkpoint import CheckpointError
from aqtlite.llm import gguf_tokenizer
from aqtlite.llm.sampling import sample
from tests.llm.support import FOLDER, loaded, logits_of

pytestmark = pytest.mark.code("quick")

PROMPT = "the dog sat on"


def greedy(decoder, tokens, count):
    """Tokens by full forwards, without a cache."""
    tokens = list(tokens)
    length = len(tokens) + count
    for n in range(len(tokens), length):
        padded = jnp.asarray([tokens + [0] * (length - n)])
        tokens.append(int(logits_of(decoder, padded)[0, n - 1].argmax()))
    return tokens[-count:]


def test_generation_takes_the_likeliest_tokens():
    decoder, tokenizer = loaded("llama"), llm.load_tokenizer(FOLDER / "llama")
    prompt = tokenizer.encode(PROMPT)
    wanted = greedy(decoder, prompt, 5)
    generation = llm.compile_generation(decoder, len(prompt), 5)
    assert list(generation.tokens(prompt)) == wanted
    last = wanted[-1]
    assert list(generation.tokens(prompt, stop=[last])) == wanted[: wanted.index(last)]
    with pytest.raises(ValueError, match="tokens, got 2"):
        list(generation.tokens([3, 14]))
    with pytest.raises(ValueError, match="token 272 .* vocabulary of 272"):
        list(generation.tokens([272] * len(prompt)))


def test_the_command_prints_the_text_and_its_speed(capsys):
    words = ["generate", str(FOLDER / "llama"), "--prompt", PROMPT]
    words += ["--max-tokens", "5", "--preset", "weight_only", "--kv-bits", "8"]
    assert program.main(words) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(PROMPT) and len(printed.out) > len(PROMPT) + 1
    assert "15 rounded" in printed.err and "generated 5" in printed.err


def test_the_command_keeps_the_space_between_prompt_and_text(capsys):
    """The tokenizer of Mistral leaves it out at the start of a text."""
    prompt, tokenizer = "the mat", llm.load_tokenizer(FOLDER / "mistral")
    tokens = tokenizer.encode(prompt)
    generation = llm.compile_generation(loaded("mistral"), len(tokens), 5)
    whole = [*tokens, *generation.tokens(tokens, stop=tokenizer.stop)]
    words = ["generate", str(FOLDER / "mistral"), "--prompt", prompt]
    assert program.main([*words, "--max-tokens", "5", "--kv-bits", "float"]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{tokenizer.inner.decode(whole)}\n"
    assert printed.startswith("the mat sat")


def test_too_few_positions_are_refused():
    with pytest.raises(ValueError, match="the 32 positions of the model"):
        llm.compile_generation(loaded("gpt2"), 30, 3)
    with pytest.raises(ValueError, match="a token or more"):
        llm.compile_generation(loaded("gpt2"), 0, 3)


def test_samples_have_the_probabilities_of_their_nucleus():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
    keys = jax.random.split(jax.random.key(0), 4000)
    for top_p, wanted in ((0.7, [2 / 3, 1 / 3, 0, 0]), (1.0, [0.5, 0.25, 0.15, 0.1])):
        how = llm.Sampling(temperature=1.0, top_p=top_p)
        draws = jax.vmap(lambda key, how=how: sample(logits, how, key))(keys)
        found = np.bincount(draws, minlength=4) / len(keys)
        np.testing.assert_allclose(found, wanted, atol=0.03)
    assert int(sample(logits, llm.Sampling(), keys[0])) == 0
    # Where a division by it alone would be infinite, or underflow.
    for temperature in (1e-37, 1e-39, 1e-300):
        how = llm.Sampling(temperature=temperature)
        assert int(sample(logits[::-1], how, keys[0])) == 3
    with pytest.raises(ValueError, match="top_p must be above 0"):
        llm.Sampling(top_p=0.0)
    with pytest.raises(ValueError, match="temperature must be 0 or more"):
        llm.Sampling(temperature=float("nan"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["qwen3"], "has no tokenizer.json"),
        (["llama", "--preset", "static_int8"], "fwd.lhs.calibration"),
        (["llama", "--top-p", "2"], "top_p must be"),
        (["llama", "--prompt", "a\udcff"], "not valid Unicode: '\\udcff' at 1 is"),
    ],
)
def test_the_command_refuses(words, message, capsys):
    source, *rest = words
    given = ["generate", str(FOLDER / source), "--prompt", PROMPT, *rest]
    assert program.main(given) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "most"),
    [
        ("--seed", "-1", 2**32 - 1),
        ("--seed", str(2**32), 2**32 - 1),
        ("--seed", "9" * 5000, 2**32 - 1),
        ("--max-tokens", "0", 2**31 - 1),
        ("--max-tokens", str(2**31), 2**31 - 1),
    ],
)
def test_the_command_refuses_numbers_out_of_range(option, value, most, capsys):
    given = ["generate", str(FOLDER / "llama"), "--prompt", PROMPT]
    with pytest.raises(SystemExit) as ended:
        program.main([*given, f"{option}={value}"])
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.count("\n") == 1
    assert f"no integer between {int(option != '--seed')} and {most} " in shown


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("load", "for the weights: quantize them by --preset"),
        ("compile_generation", "keys and values: lower --max-tokens"),
    ],
)
def test_the_command_says_what_takes_the_memory(function, message, monkeypatch, capsys):
    def fail(*args, **kwargs):
        text = "RESOURCE_EXHAUSTED: Out of memory allocating 6400000000000 bytes."
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(llm, function, fail)
    assert program.main(["generate", str(FOLDER / "llama"), "--prompt", PROMPT]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1


def pairs_of(family):
    """The key-value pairs of GGUF that say what a tokenizer.json says."""
    found = json.loads((FOLDER / family / "tokenizer.json").read_text())
    vocabulary = found["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get)
    special = {one["content"] for one in found["added_tokens"]}
    merges = found["model"]["merges"]
    return tokens, special, merges


def test_a_tokenizer_of_bytes_is_made_from_gguf():
    tokens, special, merges = pairs_of("llama")
    pairs = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(one) for one in merges],
        "tokenizer.ggml.token_type": np.array(
            [3 if t in special else 1 for t in tokens]
        ),
        "tokenizer.ggml.eos_token_id": 1,
    }
    made, stop = gguf_tokenizer.of_metadata(pairs, "file")
    wanted = llm.load_tokenizer(FOLDER / "llama")
    for text in (PROMPT, "the mat, the rug", "naïve"):
        assert made.encode(text).ids == wanted.encode(text)
    assert stop == {1}
    given = llm.Tokenizer(made, stop)
    tokens, pieces = given.encode("naïve cat"), ["n", "a", "ï", "v", "e", " ", "cat"]
    assert list(given.decoded(tokens)) == pieces
    # As are bytes of a character before the last one, but here it is the text.
    odd = given.encode("a\ufffd")
    assert list(given.decoded(tokens, after=odd)) == pieces
    assert list(given.decoded(tokens[3:], after=tokens[:3])) == pieces[2:]
    for key, value, message in (
        ("pre", "other", "pre is 'other'"),
        ("model", "bert", "the kind 'bert'"),
        ("pre", ["gpt-2"], r"pre is \['gpt-2'\]"),
        ("merges", ["a b c"], "no list of pairs"),
        ("merges", [1, 2], "merges has to be a list of strings"),
        ("tokens", None, "holds no tokenizer"),
        ("tokens", [1, 2], "tokens has to be a list of strings"),
        ("token_type", [1, 1], "token_type has to be a number for each"),
        ("token_type", 3, "token_type has to be a number for each"),
        ("eos_token_id", 10**6, "names the token 1000000, and has"),
        ("eos_token_id", [1], r"names the token \[1\], and has"),
        ("add_bos_token", "no", "add_bos_token has to be one of True, False"),
    ):
        with pytest.raises(CheckpointError, match=message):
            gguf_tokenizer.of_metadata({**pairs, f"tokenizer.ggml.{key}": value}, "f")


OF_BYTES = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [
        *"abcd",
        "ab",
        "cd",
        "<bos>",
        "<|x|>",
        "abcd",
        *"<think>",
    ],
    "tokenizer.ggml.merges": ["a b", "c d"],
    "tokenizer.ggml.bos_token_id": 6,
}


@pytest.mark.parametrize(
    ("pre", "ids"), [("llama-bpe", [6, 8, 4]), ("qwen2", [4, 5, 4]), (None, [4, 5, 4])]
)
def test_words_that_are_tokens_and_the_start_of_a_text(pre, ids):
    """Llama 3 does not merge what is a token, and texts start with a token."""
    pairs = {
        **OF_BYTES,
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
        "tokenizer.ggml.token_type": [*[1] * 6, 3, 4, *[1] * 8],
    }
    made, _ = gguf_tokenizer.of_metadata(pairs, "file")
    # Its words end before "<".
    assert made.encode("abcd<|x|>ab").ids == [*ids[:-1], 7, ids[-1]]
    for add in (True, False):
        changed = {**pairs, "tokenizer.ggml.add_bos_token": add}
        made, _ = gguf_tokenizer.of_metadata(changed, "file")
        assert (made.encode("ab").ids == [6, 4]) == add


def test_tokens_that_users_defined_are_found_in_texts_and_printed():
    tokens = [*OF_BYTES["tokenizer.ggml.tokens"], "<think>"]
    pairs = {
        **OF_BYTES,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.token_type": [*[1] * 6, 3, *[1] * 9, 4],
    }
    made, stop = gguf_tokenizer.of_metadata(pairs, "file")
    assert made.encode("<think>ab").ids == [len(tokens) - 1, 4]
    given = llm.Tokenizer(made, stop)
    assert "".join(given.decoded(given.encode("<think>ab"))) == "<think>ab"


def test_a_tokenizer_of_pieces_is_made_from_gguf():
    tokens, special, merges = pairs_of("mistral")
    rank = {"".join(one): -float(i + 1) for i, one in enumerate(merges)}
    pairs = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([rank.get(t, -1e3) for t in tokens]),
        "tokenizer.ggml.token_type": np.array(
            [3 if t in special else 1 for t in tokens]
        ),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    made, stop = gguf_tokenizer.of_metadata(pairs, "file")
    wanted = llm.load_tokenizer(FOLDER / "mistral")
    for text in (PROMPT, "on a mat"):
        assert made.encode(text).ids == [1, *wanted.encode(text)]
    given = llm.Tokenizer(made, stop)
    tokens = given.encode("the cat sat")
    assert "".join(given.decoded(tokens)) == "the cat sat"
    for count in range(1, len(tokens)):
        text = made.decode(tokens[:count])
        after = given.decoded(tokens[count:], tokens[:count])
        assert text + "".join(after) == "the cat sat"
    for scores in (3, [0.0], ["a"] * len(tokens), None):
        changed = {**pairs, "tokenizer.ggml.scores": scores}
        with pytest.raises(CheckpointError, match="scores has to be a number for each"):
            gguf_tokenizer.of_metadata(changed, "file")


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = ["generate", str(FOLDER / "llama"), "--prompt", PROMPT]
    assert program.main(given) == 2
    assert "pip install 'aqtlite[llm]'" in capsys.readouterr().err
