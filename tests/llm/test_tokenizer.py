"""Tokenizers and the tokens that end a text, beside the model or elsewhere."""

import json
import shutil

import pytest

from aqtlite import __main__ as program
from aqtlite import checkpoint, llm
from aqtlite.checkpoint import CheckpointError
from tests.common import normal
from tests.llm.support import FOLDER, loaded, quantized

pytestmark = pytest.mark.code("quick")

PROMPT = "the dog sat on"
LLAMA = FOLDER / "llama"


def file_alone(folder, **changes):
    """The tokenizer.json of Llama without the files beside it."""
    path = folder / "tokenizer.json"
    values = json.loads((LLAMA / "tokenizer.json").read_text())
    path.write_text(json.dumps({**values, **changes}))
    return path


def gguf_with(path, **pairs):
    """A GGUF file of one weight with the pairs of a tokenizer that is not read."""
    own = {"model": "t5", "tokens": ["a", "b"], **pairs}
    metadata = {
        "general.architecture": "llama",
        **{f"tokenizer.ggml.{key}": value for key, value in own.items()},
    }
    weights = {"output.weight": quantized(normal((4, 32)))}
    checkpoint.save_quantized(path, weights, format="gguf", metadata=metadata)
    return path


def test_a_tokenizer_from_elsewhere_ends_texts_as_the_model_does(tmp_path):
    path = file_alone(tmp_path)
    assert llm.load_tokenizer(path).stop == frozenset()
    wanted = llm.load_tokenizer(LLAMA).stop
    assert wanted and llm.load_tokenizer(path, model=LLAMA).stop == wanted
    weights = LLAMA / "model.safetensors"
    assert llm.load_tokenizer(path, model=weights).stop == wanted
    # A chat model's files may name the end of an answer beside that of a text.
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert llm.load_tokenizer(path, model=LLAMA).stop == {*wanted, 7, 9}


def test_a_tokenizer_from_elsewhere_ends_texts_as_a_gguf_file_does(tmp_path):
    path = file_alone(tmp_path)
    model = gguf_with(tmp_path / "m.gguf", eos_token_id=1, eot_token_id=0)
    with pytest.raises(CheckpointError, match="kind 't5' .*--tokenizer"):
        llm.load_tokenizer(model)
    assert llm.load_tokenizer(path, model=model).stop == {0, 1}
    # Beside the file in one folder, too.
    assert llm.load_tokenizer(tmp_path).stop == {0, 1}
    model = gguf_with(tmp_path / "damaged.gguf", eos_token_id="b")
    with pytest.raises(CheckpointError, match="names the token 'b', no number"):
        llm.load_tokenizer(path, model=model)


def test_the_command_ends_a_text_by_the_tokens_of_the_model(tmp_path, capsys):
    prompt = llm.load_tokenizer(LLAMA).encode(PROMPT)
    generation = llm.compile_generation(loaded("llama"), len(prompt), 5)
    first = next(generation.tokens(prompt))
    model = shutil.copytree(LLAMA, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
    words = ["generate", str(model), "--prompt", PROMPT, "--kv-bits", "float"]
    path = file_alone(tmp_path)
    assert program.main([*words, "--tokenizer", str(path), "--max-tokens", "5"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{PROMPT}\n" and "the text ends there" in printed.err


PADDING = {
    "strategy": {"Fixed": 16},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 1,
    "pad_type_id": 0,
    "pad_token": "</s>",
}
TRUNCATION = {
    "direction": "Right",
    "max_length": 2,
    "strategy": "LongestFirst",
    "stride": 0,
}


@pytest.mark.parametrize("saved", [{"padding": PADDING}, {"truncation": TRUNCATION}])
def test_what_training_saved_for_batches_leaves_prompts_as_they_are(saved, tmp_path):
    found = llm.load_tokenizer(file_alone(tmp_path, **saved))
    wanted = llm.load_tokenizer(LLAMA)
    assert found.encode(PROMPT) == wanted.encode(PROMPT)
    assert found.encode_rendered(PROMPT) == wanted.encode_rendered(PROMPT)
