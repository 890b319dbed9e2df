"""How byte-level BPE splits text before it merges, by the name that a GGUF file gives it (`tokenizer.ggml.pre`).

The names and what each does are llama.cpp's (src/llama-vocab.cpp and src/unicode.cpp of the version in
llama-cpp-python 0.3.36), so texts get the tokens that llama.cpp gives them. Some models were trained with another
expression, which llama.cpp approximates, above all for letters with case outside of ASCII and for combining marks
(`APPROXIMATED`). The expressions here are Oniguruma's, as `tokenizers` takes them; each splits every piece that the one
before it left. In llama.cpp expressions in which no category of Unicode stands see every space outside of ASCII as a
vertical tab, so no range of theirs matches one: `_RANGES_…` have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class TextSplit:
    """How a text falls into the pieces within which tokens are merged."""

    patterns: tuple[str, ...]  # applied one after another; what a pattern does not match is a piece too
    bytes_as_characters: bool = (
        True  # tokens spell bytes as GPT-2 does; else they are UTF-8, bytes are <0x00> to <0xFF>
    )
    spaces_as_underlines: bool = False  # U+2581 stands for a space
    whole_words: bool = False  # a piece that is a token is not merged
    adds_bos: bool = False  # where no key says otherwise


def _ranges(listed: str) -> str:
    """Write ranges of code points, hexadecimal, as a class of characters without its brackets."""
    return "".join("-".join(rf"\x{{{end}}}" for end in each.split("-")) for each in listed.split())


_WHOLE_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WHOLE_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_WHOLE_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}"
# Chinese, Hiragana and Katakana, and what else counts as such in the names below.
_RANGES_DEEPSEEK = _ranges("800-167F 1681-1FFF 200B-2027 202A-202E 2030-205E 2060-2FFF 3001-9FA5 AC00-D7FF")
_RANGES_KANA = _ranges("4E00-9FA5 3040-30FF")
_RANGES_HAN = _ranges("3400-4DBF 4E00-9FFF F900-FAFF 20000-2A6DF 2A700-2CEAF 2CEB0-2EBEF 2F800-2FA1F")
_RANGES_AFMOE = _ranges("E40-EFF 1000-109F 1100-11FF 1780-17FF 2F00-2FDF 3040-30FF 3400-4DBF 4E00-FAFF FF65-FF9F")
_CASED = _ranges(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
    "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
    "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)
_ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_MARKED_LETTERS = rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_MARKED_LETTERS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DIGITS_FROM_THE_RIGHT = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # the first with what precedes it
_LINES = r"[^\n]+|\n+"


def _cased(letters: str, ending: str, digits: str, *, contractions: bool = True) -> str:
    """Split a word where upper case follows lower case: outside of ASCII a letter counts as both."""
    upper, lower = f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    start, end = r"[^\r\n\p{L}\p{N}]?", f"{_WHOLE_CONTRACTIONS}?" if contractions else ""
    words = f"{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ending}|{_SPACES}"


def _marked(digits: str) -> str:
    """Letters and marks in one word, whatever their case."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_WHOLE_CONTRACTIONS}?"
    return rf"{word}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_STARCODER = (r"\p{N}", _GPT2)
_HUNYUAN = (r"\p{N}{1,3}", f"[{_RANGES_KANA}]+", _DEEPSEEK3)
_GPT4O = _cased(r"\p{L}", r"[\r\n/]*", r"\p{N}{1,3}")
_JAIS2_SPACES = "".join(rf"\s{{{1 << power}}}(?!\S)|" for power in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s"
_BAILING = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
_KIMI_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_RANGES_HAN}]]+{_WHOLE_CONTRACTIONS}?"
_EXAONE_WORD = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_YOUTU_RANGES = "|".join(
    f"[{_ranges(listed)}]+"
    for listed in (
        "AC00-D7A3 3131-318E", "FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F", "3105-312F",
        "4E00-9FA5 3040-30FF",
    )
)  # fmt: skip


def _named(names: str, *patterns: str, **more: bool) -> Iterable[tuple[str, TextSplit]]:
    split = TextSplit(patterns, **more)
    return ((name, split) for name in names.split())


SPLITS: Mapping[str, TextSplit] = MappingProxyType(
    dict(
        [
            *_named("default", r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
            *_named("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert", _GPT2),
            *_named("jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4", _GPT2),
            *_named("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", *_STARCODER),
            *_named("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3,
                    whole_words=True, adds_bos=True),
            *_named("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
            *_named("glm4 glm5", _LLAMA3, whole_words=True),
            *_named("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
            *_named("qwen35", rf"{_WHOLE_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"),
            *_named("ufakzeka", rf"{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}"),
            *_named("laguna", _LINES, _QWEN2),
            *_named("minicpm5", r"\p{N}{1,3}", rf"{_WHOLE_CONTRACTIONS}|{_LETTERS}|\p{{N}}+|{_SIGNS}|{_SPACES}",
                    whole_words=True),
            *_named("seed-coder", rf"{_WHOLE_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"),
            *_named("bailingmoe bailingmoe2 llada-moe",
                    rf"{_BAILING}|{_LETTERS}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+"),
            *_named("exaone-moe", rf"{_WHOLE_CONTRACTIONS}|{_EXAONE_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
                    r"|\s*[\r\n]|\s+(?!\S)|\s+"),
            *_named("jais-2", rf"{_WHOLE_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_JAIS2_SPACES}"),
            *_named("deepseek-llm", r"[\r\n]", rf"\s?[{_CASED}]+",
                    rf"\s?[!-/:-~{_ranges('FF01-FF0F FF1A-FF5E 2018-201F 3001-3002')}]+", r"\s+\z",
                    rf"[{_RANGES_DEEPSEEK}]+", r"\p{N}+"),
            *_named("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"[{_RANGES_DEEPSEEK}]+", r"\p{N}"),
            *_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", *_HUNYUAN),
            *_named("spark2_5", r"\p{N}{1,3}", f"[{_RANGES_KANA}]+",
                    rf"{_MARKED_LETTERS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
            *_named("afmoe", _DIGITS_FROM_THE_RIGHT, f"[{_RANGES_AFMOE}]+", _DEEPSEEK3),
            *_named("youtu", _YOUTU_RANGES, _marked(r"\p{N}"), whole_words=True),
            *_named("tiny_aya cohere2moe", _DIGITS_FROM_THE_RIGHT, _marked(r"\p{N}{1,3}")),
            *_named("falcon", r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]"),
            *_named("poro-chat bloom gpt3-finnish", _BLOOM),
            *_named("viking", _BLOOM, r"\p{N}"),
            *_named("tekken", _cased(r"\p{L}", r"[\r\n/]*", r"\p{N}", contractions=False),
                    whole_words=True, adds_bos=True),
            *_named("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
            *_named("granite-embed-multi-97m", _cased(r"\p{L}\p{M}", r"[\r\n/]*", r"\p{N}{1,3}"), whole_words=True),
            *_named("chameleon", r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}",
                    r"[\p{P}!-/:-@\[-`{-~]", _GPT2, adds_bos=True),
            *_named("kimi-k2", rf"[{_RANGES_HAN}]+|{_KIMI_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"),
            *_named("superbpe", r"\p{N}+", r"(?=(?:[0-9]{3})+(?![0-9]))"),
            *_named("sarvam-moe", _LINES, bytes_as_characters=False, spaces_as_underlines=True),
        ]
    )
)  # fmt: skip
_LINE_ENDS = "llama.cpp takes line ends together there, which the tokenizers library cannot express"
INEXPRESSIBLE: Mapping[str, str] = MappingProxyType(
    {
        "gemma4": _LINE_ENDS,
        "granite-embed-multi-311m": _LINE_ENDS,
        "whitespace": "of gpt2's kind llama.cpp itself stops at the first space of a text there",
    }
)
# Where llama.cpp's expression is known to differ from the one that the models were trained with.
APPROXIMATED = (
    "afmoe", "cohere2moe", "gpt-4o", "granite-embed-multi-97m", "kanana2", "kimi-k2", "llama4", "minimax-m2", "talkie",
    "tekken", "tiny_aya", "youtu",
)  # fmt: skip
