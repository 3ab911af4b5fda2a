"""From the file of a language model to text: decoders in NNX and Linen, and generation.

The decoder holds a file's integers as they are; `load` reads folders of Hugging Face
and GGUF files by the maps of `names`. Read `decoder` first.
"""

from aqtlite.llm.chat import ChatTemplate, load_chat_template
from aqtlite.llm.config import DecoderConfig, Rope
from aqtlite.llm.decoder import Decoder
from aqtlite.llm.generation import Generation, compile_generation
from aqtlite.llm.linen_decoder import LinenDecoder
from aqtlite.llm.loading import Loaded, load, load_linen, moves_of
from aqtlite.llm.sampling import Sampling
from aqtlite.llm.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ChatTemplate",
    "Decoder",
    "DecoderConfig",
    "Generation",
    "LinenDecoder",
    "Loaded",
    "Rope",
    "Sampling",
    "Tokenizer",
    "compile_generation",
    "load",
    "load_chat_template",
    "load_linen",
    "load_tokenizer",
    "moves_of",
]
