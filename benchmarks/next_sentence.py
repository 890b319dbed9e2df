"""Make the items of docs/tasks/next-sentence.yaml: which of four sentences goes on with a text?

One sentence is the text's own, three are of other documents and about as long. Several items are of one document.
Usage: python -m benchmarks.next_sentence tests/data/evaluation.jsonl docs/tasks/next-sentence.jsonl
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

ITEMS, CHOICES = 4, 4  # of a document, and of an item
BEFORE, SHORTEST, LONGEST = 300, 40, 160  # characters of the context at least, and of a sentence
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def main(source: Path, target: Path) -> None:
    documents = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    texts = {each["id"]: _SENTENCE.split(" ".join(each["text"].split())) for each in documents}
    pool = [(name, sentence) for name, sentences in texts.items() for sentence in sentences if _fits(sentence)]
    rng, lines = random.Random(0), []
    for name, sentences in texts.items():
        places = [i for i in range(1, len(sentences)) if _fits(sentences[i]) and len(" ".join(sentences[:i])) >= BEFORE]
        for at in sorted(rng.sample(places, min(ITEMS, len(places)))):
            true = sentences[at]
            near = sorted(
                (other for other in pool if other[0] != name), key=lambda other: abs(len(other[1]) - len(true))
            )
            choices = [true, *(sentence for _, sentence in rng.sample(near[:24], CHOICES - 1))]
            rng.shuffle(choices)
            context = " ".join(sentences[:at])[-2 * BEFORE :]
            item = {"document": name, "context": context, "choices": choices, "answer": choices.index(true)}
            lines.append(json.dumps(item, ensure_ascii=False))
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{target}: {len(lines)} items of {len(texts)} documents")


def _fits(sentence: str) -> bool:
    return SHORTEST <= len(sentence) <= LONGEST


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
