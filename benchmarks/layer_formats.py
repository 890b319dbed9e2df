"""What bits by layer gain over one format, weights rounded to nearest: python -m benchmarks.layer_formats CHECKPOINT.

Prices are ½ Σ F·e² of the rounding errors e of a weight, with the diagonal F of Fisher's information, the mean of g²x²
over tokens whose labels the model draws (`calibration.gradients` has the source): one run backwards over few windows.
Layers, halves of them (attention, and what follows) or linears that read the same get 4, 5, 6 or 8 bits, in as many
bytes as 6 bits in all take. Measured are the KLD on evaluation text and on answers of the checkpoint to chats, both
shipped with llmforge. Weights alone are rounded, in llmforge's formats for CPU kernels; one thread. Decoders alone
whose linears lie in `model.layers` and whose head is tied to the embedding.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmforge import recipes
from llmforge.quantization import allocation
from llmforge.quantization.allocation import FormatOption
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import dequantize, round_to_nearest

BITS, UNIFORM, BLOCK = (4, 5, 6, 8), 6, 32
ANSWER, CHATS = 32, 10  # tokens, and chats of each file
GROUPS = ("layer", "half", "linear")
_SHARED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}

Text = tuple[torch.Tensor, int]  # ids [1, tokens], and how many are asked in front of an answer; 0: it is a document
Bits = Mapping[str, int]  # of each weight


class RoundedModel:
    """A checkpoint, its weights in every format, and what they lose."""

    def __init__(self, path: Path) -> None:
        """Read it, and round each weight in every format."""
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
        layers = {f"{name}.weight": module for name, module in self.model.named_modules() if ".layers." in name}
        self.linears = {name: module for name, module in layers.items() if isinstance(module, torch.nn.Linear)}
        self.table = "model.embed_tokens.weight"
        self.own = {name: self.model.get_parameter(name).clone() for name in (*self.linears, self.table)}
        self.rounded: dict[tuple[str, int], torch.Tensor] = {}
        self.sizes: dict[tuple[str, int], int] = {}
        for name, weight in self.own.items():
            for bits in BITS:
                grid = Grid(bits, BLOCK, name == self.table or bits == 8, "int8")
                self.rounded[name, bits] = torch.from_numpy(dequantize(round_to_nearest(weight.numpy(), grid)))
                self.sizes[name, bits] = allocation.size_bytes(*weight.shape, grid)

    def documents(self, name: str, count: int, length: int) -> list[Text]:
        """Cut a file into windows, and take `count` evenly."""
        cut = []
        for line in (recipes.TEXT / name).read_text().splitlines():
            ids = self.tokenizer(json.loads(line)["text"], add_special_tokens=False).input_ids
            cut += [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
        return [(torch.tensor(cut[int(at * len(cut) / count)])[None], 0) for at in range(count)]

    def chats(self, name: str, count: int) -> list[Text]:
        """Answer every second chat of a file, at most `count`."""
        made = []
        for line in (recipes.TEXT / name).read_text().splitlines()[::2][:count]:
            asked = self.tokenizer.apply_chat_template(
                json.loads(line)["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            made.append(
                (self.model.generate(asked, max_new_tokens=ANSWER, do_sample=False, pad_token_id=0), asked.shape[1])
            )
        return made

    def logits(self, text: Text) -> torch.Tensor:
        """Return log-probabilities [tokens, vocabulary], of an answer's tokens alone where there is one."""
        ids, asked = text
        with torch.no_grad():
            logits: torch.Tensor = self.model(ids).logits[0].log_softmax(-1)
        return logits[asked - 1 : -1] if asked else logits

    def fisher(self, texts: Sequence[Text]) -> dict[str, torch.Tensor]:
        """Return the diagonal of each weight, [N, K], for each token; of the table, of each of its rows alike, [K]."""
        found = {name: torch.zeros_like(self.own[name]) for name in self.linears}
        random, table, tokens = torch.Generator().manual_seed(0), torch.zeros(self.own[self.table].shape[1]), 0

        def watch(total: torch.Tensor) -> Any:
            def forward(_: Any, read: tuple[torch.Tensor], out: torch.Tensor) -> None:
                def backward(gradient: torch.Tensor) -> None:
                    total.addmm_(gradient[0].square().T, read[0].detach()[0].square())

                out.register_hook(backward)

            return forward

        hooks = [module.register_forward_hook(watch(found[name])) for name, module in self.linears.items()]
        for ids, _ in texts:
            entered = self.model.model.embed_tokens(ids).requires_grad_()
            state = self.model.model(inputs_embeds=entered).last_hidden_state
            logits = self.model.lm_head(state)[0]
            p = logits.detach().softmax(-1)
            labels = torch.multinomial(p, 1, generator=random)[:, 0]
            torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
            spread = (p * (1 - p)).sum(-1, keepdim=True)
            table += entered.grad[0].square().sum(0) + (spread * state.detach()[0].square()).sum(0)
            tokens += ids.shape[1]
        for hook in hooks:
            hook.remove()
        found[self.table] = table / len(self.own[self.table])
        return {name: each / tokens for name, each in found.items()}

    def prices(self, fisher: Mapping[str, torch.Tensor]) -> dict[tuple[str, int], float]:
        """Return what each format of each weight is to lose, nats a token."""
        return {
            (name, bits): 0.5 * float((fisher[name] * (rounded - self.own[name]).square()).sum())
            for (name, bits), rounded in self.rounded.items()
        }

    def allocate(self, prices: Mapping[tuple[str, int], float], group: str, most: int) -> Bits:
        """Give the weights of each group the bits that lose least in `most` bytes."""
        groups: dict[str, list[str]] = {}
        for name in self.own:
            *_, layer, part, linear, _ = name.split(".") if name in self.linears else ("", "table", "", "", "")
            own = {"layer": "", "half": part, "linear": _SHARED.get(linear, linear)}[group]
            groups.setdefault(f"{layer} {own}", []).append(name)
        options = {
            key: [
                FormatOption(*(sum(of[name, bits] for name in names) for of in (self.sizes, prices))) for bits in BITS
            ]
            for key, names in groups.items()
        }
        places = allocation.allocate(options, most)
        return {name: BITS[places[key]] for key, names in groups.items() for name in names}

    def divergences(self, bits: Bits, texts: Sequence[Text], before: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Give the KLD of each text's tokens from log-probabilities `before`, with weights in `bits`."""
        for name in self.own:
            self.model.get_parameter(name).copy_(self.rounded[name, bits[name]])
        for text, p in zip(texts, before, strict=True):
            yield (p.exp() * (p - self.logits(text))).sum(-1)
        for name, weight in self.own.items():
            self.model.get_parameter(name).copy_(weight)


def main() -> None:
    """Price, choose, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--windows", type=int, default=4, help="of 256 tokens, that prices are taken from")
    parser.add_argument("--chats", type=int, default=0, help="that prices are taken from besides")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = RoundedModel(args.checkpoint)
    texts = [*model.documents("evaluation.jsonl", 6, 512), *model.chats("chat-evaluation.jsonl", CHATS)]
    before = [model.logits(text) for text in texts]
    priced = model.documents("calibration.jsonl", args.windows, 256)
    priced += model.chats("chat-calibration.jsonl", args.chats)
    began = time.process_time()
    prices = model.prices(model.fisher(priced))
    print(f"prices of {sum(ids.shape[1] for ids, _ in priced):,} tokens: {time.process_time() - began:.1f} CPU s")
    uniform = dict.fromkeys(model.own, UNIFORM)
    most = sum(model.sizes[each] for each in uniform.items())
    chosen = {"uniform": uniform, **{group: model.allocate(prices, group, most) for group in args.groups}}
    parameters = sum(map(torch.Tensor.numel, model.model.parameters()))
    print(f"{'':10}{'bits':>7}{'predicted':>11}{'documents':>11}{'chats':>9}")
    for name, bits in chosen.items():
        found = list(model.divergences(bits, texts, before))
        kld = [
            float(
                torch.cat([each for each, (_, asked) in zip(found, texts, strict=True) if bool(asked) == chat]).mean()
            )
            for chat in (False, True)
        ]
        size = sum(model.sizes[each] for each in bits.items()) + 4 * (
            parameters - sum(map(torch.Tensor.numel, model.own.values()))
        )
        predicted = sum(prices[each] for each in bits.items())
        print(f"{name:10}{8 * size / parameters:7.2f}{predicted:11.4f}{kld[0]:11.4f}{kld[1]:9.4f}", flush=True)
        if name == "layer":
            by_layer = {each.split(".")[2]: given for each, given in bits.items() if each in model.linears}
            others = {layer: given for layer, given in by_layer.items() if given != UNIFORM}
            print(f"  layers: {others}, embedding: {bits[model.table]}")


if __name__ == "__main__":
    main()
