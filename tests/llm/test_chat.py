"""Chat templates of checkpoints."""

import json

import numpy as np
import pytest

from aqtlite import __main__ as program
from aqtlite import checkpoint, llm
from aqtlite.checkpoint import CheckpointError
from aqtlite.llm.chat import ChatTemplate
from tests.common import normal
from tests.llm.chats import CHATML, LLAMA, MARKED, MESSAGES, folder_with
from tests.llm.support import FOLDER, quantized

pytestmark = pytest.mark.code("quick")


def test_templates_are_rendered_as_their_models_expect(tmp_path):
    """The texts are those of transformers (`tests/models/test_chat.py`)."""
    folder = folder_with(tmp_path / "llama", LLAMA)
    assert llm.load_chat_template(folder).render(MESSAGES) == (
        '<s>\n[{"role": "user", "content": " Ist 1 < 2 & \'schön\'? "}]</s>\n'
        '[{"role": "assistant", "content": "Ja"}]</s>\n'
        '[{"role": "user", "content": "Danke"}]\n'
    )
    folder = folder_with(tmp_path / "chatml", CHATML, in_config=False)
    assert llm.load_chat_template(folder).render(MESSAGES[:1]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nIst 1 < 2 & 'schön'?<|im_end|>\n<|im_start|>assistant\n"
    )
    folder = folder_with(tmp_path / "marked", MARKED)
    assert llm.load_chat_template(folder).render([*MESSAGES[:2], MESSAGES[3]]) == (
        '{"content":" Ist 1 < 2 & \'schön\'? ","role":"user"}'
        '2Ja</s>{"content":"Danke","role":"user"}'
    )


def test_the_template_of_a_file_is_before_that_of_the_config(tmp_path):
    folder = folder_with(tmp_path / "both", "of the config")
    assert llm.load_chat_template(folder).render([]) == "of the config"
    several = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": several})
    )
    assert llm.load_chat_template(folder).render([]) == "b"
    (folder / "chat_template.jinja").write_text("of the file")
    assert llm.load_chat_template(folder).render([]) == "of the file"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LLAMA, "System role not supported"),
        ("{% for", "TemplateSyntaxError"),
        ("{% generation %}", "TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ strftime_now.__globals__['os'] }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% include 'other' %}", "no loader"),
        ("{{ 'a' * 10 ** 15 }}", "MemoryError"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused(text, message):
    messages = [{"role": "system", "content": "Be brief"}]
    with pytest.raises(CheckpointError, match=f"template of a file.*{message}"):
        ChatTemplate(text, {}, "a file").render(messages)


def gguf_file(path, **pairs):
    own = {"ggml.tokens": ["<s>", "a"], "ggml.bos_token_id": np.uint32(0), **pairs}
    metadata = {
        "general.architecture": "llama",
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        **{f"tokenizer.{key}": value for key, value in own.items()},
    }
    weights = {"output.weight": quantized(normal((4, 32)))}
    checkpoint.save_quantized(path, weights, format="gguf", metadata=metadata)
    return path


def test_the_template_of_a_gguf_file(tmp_path):
    template = llm.load_chat_template(gguf_file(tmp_path / "one.gguf"))
    assert template.render([{"role": "user", "content": "a"}]) == "<s>a"
    for i, wrong in enumerate(("0", np.float32(0), np.array([0, 1], np.uint32))):
        path = gguf_file(tmp_path / f"{i}.gguf", **{"ggml.bos_token_id": wrong})
        with pytest.raises(CheckpointError, match=r"names the token .*, no number"):
            llm.load_chat_template(path)


def test_the_command_answers(tmp_path, capsys):
    folder = folder_with(
        tmp_path / "chatml", "{{ bos_token }}{{ messages[0].content }}"
    )
    words = ["generate", str(folder), "--prompt", "the dog sat on", "--chat"]
    assert program.main([*words, "--max-tokens", "2"]) == 0
    printed = capsys.readouterr()
    assert not printed.out.startswith("the dog")
    count = len(llm.load_tokenizer(folder).encode("the dog sat on"))
    assert f"prompt {count + 1} tokens" in printed.err
    words[1] = str(FOLDER / "llama")
    assert program.main(words) == 2
    assert "has no chat template, neither" in capsys.readouterr().err


def test_damaged_settings_are_refused(tmp_path):
    folder = folder_with(tmp_path / "damaged", 7)
    with pytest.raises(CheckpointError, match="has to be a text .* got int"):
        llm.load_chat_template(folder)
