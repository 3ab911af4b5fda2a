"""Chat templates, against those that transformers renders."""

import pytest
import transformers

from aqtlite import llm
from tests.llm.chats import MESSAGES, TEMPLATES, folder_with

pytestmark = pytest.mark.code("quick")


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name, tmp_path):
    folder = folder_with(tmp_path / name, TEMPLATES[name], in_config=name == "llama")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    text = theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert llm.load_chat_template(folder).render(MESSAGES) == text
    wanted = theirs.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert llm.load_tokenizer(folder).encode_rendered(text) == wanted
