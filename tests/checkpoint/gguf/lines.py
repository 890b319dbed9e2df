"""Lines that are hard to split into tokens: multilingual text, code, numbers and spaces."""

from __future__ import annotations

import random

HARD = [
    "Hello, world! It's HE'S we'Ll  don't I'D\u2019ve \u017fs 'T'",
    "  two   spaces\tand\t\ttabs \n\n \n  \r\n\r next\r\n   ",
    "0 12 123 1234 12345 123456 1234567890123 3.14159 1,000,000 ٣٤٥ १२३४ ²³¹ Ⅻ ½ １２３４５",
    "straßeÜber ÉcoleÉCOLE camelCaseHTTPServer XMLhttp snake_case_name __init__ ΑΒΓαβγΔδ",
    "नमस्ते दुनिया, यह हिन्दी है। বাংলা ভাষা தமிழ் ภาษาไทยไม่มีช่องว่าง",
    "我喜欢编程，特别是Python。東京タワーは333メートルです！한국어 문장도 있다… ㄱㄴㄷ ㄅㄆ",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם۔ Привет, МИР! Ѓorђe",
    "for (int i=0;i<n;++i){a[i]+=b[i]*0x1F;} // $PATH ~/.x `cmd` <a href='#'>^|</a> #!/bin/sh",
    "e\u0301te\u0301 A\u030aNGSTRO\u0308M n\u0303\u0303 \u200bzero\u200dwidth\ufeff \u00a0nb\u3000wide\u2028s\x85n",
    "🙂👩‍👩‍👧 emoji🏳️‍🌈text ☃!?… «quoted» “x” ‘y’ — – •",
    "<sentinel:12> IMGIMGABCZ <dna>ACGT</dna> \x00\x01\x1c\x1f\x7f end",
    "Ωmega ℵ0 ℝ𝔸𝒷 ﬁ ǅ ʰ \U00020000\U0002a6d6㐀豈 ꙮ ႠႡ ἈΙ 𐐀𐐨 Աբգ",
    "a" * 70 + " " * 70 + "\n" * 20 + "\t" * 9 + "1" * 40,
    " \n",
    "don'tell x'tell 'llama_'rest 'MAD 'stop rock'n'Roll o'clock's i'llness a;\n\nb!\r\nc/\n/d",
    "x" + " " * 37 + "y" + " " * 11 + "z   7  88 aBcDEf.\n12345a1234567b",
    "x \u3000\u2003 y\u1680z  \u00a0\u00a0 \n\u3000\n",
]  # fmt: skip
SENTENCES = [
    "The quick brown fox jumps over the lazy dog.", "It's what they'd've said, wasn't it?", "I'LL DO IT; YOU'RE LATE",
    "Der schnelle braune Fuchs springt über den faulen Hund.", "Größe, Straße und ÄRGER: 12,50 €",
    "L'été dernier, à Évry, j'ai mangé des crêpes.", "¿Dónde está el baño? ¡Aquí, señor!", "Você não está à toa, João.",
    "Perché no? È così.", "Zażółć gęślą jaźń", "Příliš žluťoučký kůň úpěl ďábelské ódy", "Árvíztűrő tükörfúrógép",
    "İstanbul'da ıssız bir gün, Ankara'nın", "Съешь ещё этих мягких французских булок.", "Чуєш їх, доцю, га?",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία", "שפן אכל קצת גזר בטעם חסה", "نص حكيم له سر قاطع وذو شأن عظيم",
    "ژرفای این مسئله را ببینید؛ ۱۲۳", "یہ اردو کا جملہ ہے۔", "ऋषियों को सताने वाले दुष्ट राक्षसों", "আমি বাংলায় গান গাই।",
    "நான் தமிழ் பேசுகிறேன்", "నేను తెలుగు మాట్లాడతాను", "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า", "ພາສາລາວ ສະບາຍດີ", "ភាសាខ្មែរ", "မြန်မာဘာသာ",
    "ქართული ენა", "Հայոց լեզու", "አማርኛ ቋንቋ", "视野无限广，窗外有蓝天。", "敏捷的棕色狐狸跳過懶狗",
    "いろはにほへと ちりぬるを",
    "カタカナとｶﾀｶﾅ",
    "다람쥐 헌 쳇바퀴에 타고파", "Tiếng Việt có dấu: Ngày mai trời đẹp", "Bahasa Indonesia: ke-2, anak-anak",
    "Kiswahili ni lugha",
    "Dansk: æøå ÆØÅ", "Íslenska: Þórður", "Esperanto: ĉapelo ŝuo", "Latin: QVIS CVSTODIET", "🙂🎉 party 👍🏽👩‍💻",
]  # fmt: skip
CODE = [
    "def f(x: int, *args, **kwargs) -> None:", "    return {k: v for k, v in d.items() if v is not None}",
    "\t\tx += 1;",
    "if (a != b && c <= d || !e) { printf(\"%d\\n\", a->b[3]); }", "#include <stdio.h>", "SELECT * FROM t WHERE a='b';",
    "<div class=\"x\">&nbsp;</div>", "git commit -m 'fix: it''s' --no-verify", "const f = async () => await g?.h ?? 0;",
    "\\frac{a}{b} + \\sum_{i=0}^{n} x_i^2", "https://example.com/a/b?c=d&e=%20f#g", "{\"key\": [1, 2.5e-10, null]}",
    "@decorator", "x = 0b1010 | 0xFF ^ ~y << 2 >> 1", "/* comment */ // another", "user@example.org +49-30-123456",
]  # fmt: skip
SPACES = [
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n ",
    "\u00a0",
    "\u3000",
    "\u2009",
    "    ",
    " " * 17,
    "",
]
ALPHABETS = [
    (0x21, 0x7E), (0xA1, 0x17F), (0x180, 0x24F), (0x250, 0x36F), (0x370, 0x3FF), (0x400, 0x52F), (0x5D0, 0x5EA),
    (0x620, 0x6D3), (0x904, 0x963), (0xE01, 0xE4E), (0x1E00, 0x1EFF), (0x2010, 0x205E), (0x20A0, 0x20BF),
    (0x2100, 0x218B), (0x2200, 0x22FF), (0x2460, 0x24FF), (0x3001, 0x30FF), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3),
    (0xFF01, 0xFFDC), (0x1F600, 0x1F64F),
]  # fmt: skip


def many(count: int) -> list[str]:
    """Make lines that are the same every time, the hard ones first."""
    chosen = random.Random(0)

    def number() -> str:
        digits = "".join(chosen.choices("0123456789", k=chosen.randint(1, 24)))
        return chosen.choice([digits, f"{digits[:3]}.{digits}", f"-{digits},{digits[:3]}", f"{digits}%"])

    def drawn() -> str:
        first, last = chosen.choice(ALPHABETS)
        return "".join(chr(chosen.randint(first, last)) for _ in range(chosen.randint(1, 12)))

    def words() -> str:
        found = chosen.choice(SENTENCES).split()
        start = chosen.randrange(len(found))
        return " ".join(found[start : start + chosen.randint(1, 6)])

    pieces = [number, drawn, words, words, lambda: chosen.choice(CODE)]
    made = [*HARD, *SENTENCES, *CODE]
    while len(made) < count:
        line = ""
        for _ in range(chosen.randint(1, 8)):
            line += chosen.choice(pieces)() + chosen.choice(SPACES)
        made.append(line)
    return made[:count]
