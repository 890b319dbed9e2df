"""Which language a text is in: by its script, and where that is Latin by the words that languages are made of.

Function words are the commonest of a language and rare in others; a text without enough of them is in none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

FEWEST = 3  # function words, or letters of a script, that tell a language
MARGIN = 1.2  # times as many words of a language as of the next one

_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(words.split())
    for language, words in {
        "en": "the of and to a in is it you that was for on are with as this be at have from or by not what all were "
        "when your can said there an each which she do how their if will up other about out many then them these so "
        "some would make like into has more her two see no way could people my than first been who its now find long",
        "fr": "le la les un une des du de et est en que qui dans pour pas sur au aux avec ce cette il elle nous vous "
        "ils sont plus par je ne se son sa ses mais ou où comme fait être avoir peut tout leur été très aussi même "
        "bien sans votre notre on y d l c j qu s n",
        "de": "der die das und ist in den von zu mit sich des auf für nicht ein eine als auch es an werden aus er hat "
        "dass sie nach wird bei einer um am sind noch wie einem über so zum war haben nur oder aber vor zur bis mehr "
        "durch man ihr ich wenn kann",
        "es": "el la los las de y que en un una por con no para es se del al lo como más su sus le ya o este sí porque "
        "esta son entre cuando muy sin sobre también me hasta hay donde quien desde todo nos durante uno ni contra "
        "otros ese eso ante ellos puede tiene está",
        "it": "il lo la gli le di e che in un una per con non è si del della dei delle al alla da come più sono ma "
        "anche questo questa nel nella ha o se ci suo sua essere molto loro dal dalla tra quando può ogni dove cui "
        "quella quello i",
        "pt": "o os as de e que em um uma para com não é se do da dos das no na nos nas por mais como mas foi ao ele "
        "sua ou quando muito há já está eu também só pelo pela até isso ela entre era depois sem mesmo aos ter seus "
        "são você pode",
        "nl": "de het een en van in is dat op te zijn met voor niet aan er om ook als dan maar bij nog uit door over "
        "ze zich hebben of kan geen deze naar worden wordt hij was heeft wat meer je tot moet die",
    }.items()
}
_SCRIPTS: Mapping[str, str] = {  # letters of a script that one language of these has, the more particular first
    "ja": r"[\u3040-\u30ff]",
    "ko": r"[\uac00-\ud7af]",
    "zh": r"[\u4e00-\u9fff]",
    "ru": r"[\u0400-\u04ff]",
    "el": r"[\u0370-\u03ff]",
    "ar": r"[\u0600-\u06ff]",
    "he": r"[\u0590-\u05ff]",
    "hi": r"[\u0900-\u097f]",
    "th": r"[\u0e00-\u0e7f]",
}
LANGUAGES = (*_WORDS, *_SCRIPTS)


def language_of(text: str) -> str | None:
    """Name the language of a text, as ISO 639-1 does; None: it cannot be told."""
    letters = len(re.findall(r"[^\W\d_]", text))
    for language, script in _SCRIPTS.items():
        found = len(re.findall(script, text))
        share = 5 if language == "ja" else 2  # Japanese is written in Chinese characters, too
        if found >= FEWEST and share * found >= letters:
            return language
    words = re.findall(r"[^\W\d_]+", text.casefold())
    said = Counter({language: sum(word in known for word in words) for language, known in _WORDS.items()})
    (first, most), (_, next_) = said.most_common(2)
    return first if most >= FEWEST and most >= MARGIN * next_ else None
