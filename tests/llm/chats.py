"""Chat templates of the kinds that models have, and the folders that hold them."""

import json
import shutil

from tests.llm.support import FOLDER

CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' }}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA = """{{ bos_token }}
{% for message in messages %}
  {% if message['role'] == 'system' %}
    {{ raise_exception('System role not supported') }}
  {% endif %}
  {% if message['role'] == 'skip' %}{% continue %}{% endif %}
[{{ message | tojson }}]{{ eos_token if not loop.last }}
{% endfor %}
"""

# Tells what is missing from what is undefined, and marks what training learns.
MARKED = """{%- if tools is not none or documents is not none %}TOOLS{% endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- generation %}
      {%- set text = loop.index ~ message.content %}
      {{- text + eos_token }}
    {%- endgeneration %}
    {{- text }}
  {%- else %}
    {{- message | tojson(sort_keys=true, separators=(',', ':')) }}
  {%- endif %}
{%- endfor %}
"""

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "marked": MARKED}

MESSAGES = [
    {"role": "user", "content": " Ist 1 < 2 & 'schön'? "},
    {"role": "assistant", "content": "Ja"},
    {"role": "skip", "content": "nothing"},
    {"role": "user", "content": "Danke"},
]


def folder_with(path, template, *, in_config=True):
    """The Llama of transformers, with a template."""
    shutil.copytree(FOLDER / "llama", path)
    settings = {
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if in_config:
        settings["chat_template"] = template
    else:
        (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
