"""The original checkpoint as transformers runs it, with the weights of one layer in memory at a time.

Every text goes through a layer before the next one is read. Hidden states wait in a file; embedding and head are read
in tiles. The modules, their arguments and the texts are those of the baseline that is loaded whole.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmforge.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmforge.measure.quality import Logits

GENERATED = 8  # tokens that are generated at most: each takes a walk through all weights
_PROBED = 3  # tokens of the texts that tell whether a model can be run so


class StreamedBaseline:
    """A checkpoint in transformers, in fp32 arithmetic on its stored weights, layer by layer.

    Memory: the fp32 weights of one layer, the hidden states of one text, and its logits.
    """

    def __init__(self, checkpoint: Checkpoint, *, threads: int) -> None:
        """Look at the structure; no weight of a layer is read.

        Raises:
            UnsupportedError: the model's layers cannot be run one by one.
        """
        import torch
        import transformers

        from llmforge.calibration.skeleton import Skeleton
        from llmforge.trace.hooks import internals

        self._threads = threads
        with self._computing(), internals.third_party("running the model layer by layer"):
            self._skeleton = Skeleton.build(checkpoint)
            self._frame = self._skeleton.frame()
            for first in range(2):  # what layers are called with must not depend on the text
                ids = np.arange(first, first + _PROBED) % checkpoint.geometry.vocabulary
                states, _ = self._frame.enter(ids)
            self._frame.leave(ids, states)
        self.hidden = int(states.shape[-1])  # features of its hidden states
        self.description = (
            f"transformers {transformers.__version__}, torch {torch.__version__}, fp32 arithmetic on the stored "
            f"weights, layer by layer, attention {self._skeleton.model.config._attn_implementation}, threads: {threads}"
        )

    def of(
        self, texts: Sequence[NDArray[np.int64]], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Logits:
        """Return what gives the logits [S, V] of each of `texts`, ids [S], with no cache.

        The first that is asked for takes all of them through the layers; `progress` is told how many are done.
        """
        held: list[Logits] = []

        def logits(ids: NDArray[np.int64]) -> NDArray[np.float32]:
            if not held:
                held.append(self.logits_of(self.walk(texts, progress)))
            return held[0](ids)

        return logits

    def logits_of(self, states: States) -> Logits:
        """Return what gives the logits of each text whose `states` after the last layer are there."""

        def logits(ids: NDArray[np.int64]) -> NDArray[np.float32]:
            with self._computing():
                made: NDArray[np.float32] = self._frame.leave(_ids(ids), states.get(ids)).numpy()
            return made

        return logits

    def greedy(self, texts: Sequence[NDArray[np.int64]], counts: Sequence[int]) -> list[list[int]]:
        """Continue each of `texts`, ids [S], by as many tokens as `counts` says, but `GENERATED` at most."""
        going = [np.asarray(ids, np.int64) for ids in texts]
        found: list[list[int]] = [[] for _ in texts]
        for step in range(min(max(counts, default=0), GENERATED)):
            unfinished = [place for place, count in enumerate(counts) if step < count]
            logits = self.of([going[place] for place in unfinished])
            for place in unfinished:
                token = int(logits(going[place])[-1].argmax())
                found[place].append(token)
                going[place] = np.append(going[place], token)
        return found

    def walk(
        self, texts: Sequence[NDArray[np.int64]], progress: Callable[[int, int], None], file: BinaryIO | None = None
    ) -> States:
        """Take `texts` through all layers: their hidden states in `file`; None: one that goes away with them."""
        texts = list({_key(ids): _ids(ids) for ids in texts}.values())
        states, calls = States(file), []
        depth = len(self._skeleton.layers)
        progress(0, depth)
        with self._computing():
            for ids in texts:
                entered, called = self._frame.enter(ids)
                states.put(ids, entered)
                calls.append(called)
            for index in range(depth):
                called_with = [called[index] for called in calls]
                layer = replace(self._skeleton.load(index, called_with), as_transformers=True)
                for number, ids in enumerate(texts):
                    states.put(ids, layer.run(number, states.get(ids)))
                del layer  # before the next one is read
                progress(index + 1, depth)
        return states

    @contextmanager
    def _computing(self) -> Iterator[None]:
        import torch

        from llmforge.trace.hooks import internals

        with torch.inference_mode(), internals.torch_threads(self._threads):
            yield


class States:
    """Hidden states of texts, fp32 [1, tokens, hidden], in a file; by default in one without a name, that goes away."""

    def __init__(self, file: BinaryIO | None = None, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        """Begin with no states, or with those that lie in `file` one after the other, in the `shapes` of `index`."""
        self._file: Any = file
        if file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._end = 0
        for key, shape in (shapes or {}).items():
            self._place(key, tuple(shape))

    @property
    def index(self) -> dict[str, tuple[int, ...]]:
        """Digests of the texts, and the shapes of their states, in the order of the file."""
        self._file.flush()
        return {key: shape for key, (_, shape) in self._places.items()}

    def put(self, ids: NDArray[np.int64], states: Any) -> None:
        """Write the states of a text, over those that it had."""
        array = states.numpy()
        if (key := _key(ids)) not in self._places:
            self._place(key, array.shape)
        offset, shape = self._places[key]
        assert shape == array.shape, "a layer changes the shape of hidden states"
        self._file.seek(offset)
        self._file.write(np.ascontiguousarray(array).data)

    def get(self, ids: NDArray[np.int64]) -> Any:
        """Read them."""
        import torch

        offset, shape = self._places[_key(ids)]
        array = np.empty(shape, np.float32)
        self._file.seek(offset)
        if self._file.readinto(array.data.cast("B")) != array.nbytes:
            raise OSError("the file of hidden states was cut off")
        return torch.from_numpy(array)

    def _place(self, key: str, shape: tuple[int, ...]) -> None:
        self._places[key] = self._end, shape
        self._end += math.prod(shape) * np.dtype(np.float32).itemsize


def _ids(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.array(ids, np.int64)


def _key(ids: NDArray[np.int64]) -> str:
    return hashlib.sha256(_ids(ids).tobytes()).hexdigest()
