"""SentencePiece BPE (`tokenizer.ggml.model` = "llama"): neighbours whose union is a token merge, the highest score first.

Our own, not the `tokenizers` package's: GGUF gives scores, not merges. Listing every pair that makes one of Gemma's 262,144 tokens
takes longer than loading the model, and equal scores would have to merge from the left whatever pair they come from.
"""

from __future__ import annotations

import re
from heapq import heapify, heappop, heappush

from numba_meta.errors import UsageError
from numba_meta.models.text.vocabulary import Vocabulary

SPACE = "▁"  # U+2581 stands for a space inside the vocabulary
_MAX_REMEMBERED = 1 << 16  # segments whose ids are kept


class SentencePieceEncoder:
    """text without special tokens → ids, in time n log n of the longest stretch that no cut divides."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._id_of = vocabulary.id_of
        self._scores = vocabulary.scores or ()
        self._unknown_id = vocabulary.unknown_id
        self._byte_ids: list[int | None] = []
        for byte in range(256):
            by_name = vocabulary.id_of.get(f"<0x{byte:02X}>")
            self._byte_ids.append(by_name if by_name is not None or byte > 0x7F else vocabulary.id_of.get(chr(byte)))
        # No merge crosses "x▁" unless some token holds "x▁", so what precedes such a ▁ stands alone, and words can be remembered.
        joined = "\0".join(vocabulary.tokens)
        uncut = {SPACE} | {pair[0] for pair in re.findall(f"[^\0]{SPACE}", joined)}
        self._cut = re.compile(f"(?<=[^{re.escape(''.join(sorted(uncut)))}])(?={SPACE})")
        self._remembered: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """`text`'s ids. Raises UsageError for a character that the vocabulary has no bytes for."""
        ids: list[int] = []
        for segment in self._cut.split(text.replace(" ", SPACE)):
            known = self._remembered.get(segment)
            if known is None:
                known = [i for piece in self._merge(segment) for i in self._ids_of_piece(piece)]
                if len(self._remembered) >= _MAX_REMEMBERED:
                    self._remembered.clear()
                self._remembered[segment] = known
            ids += known
        return ids

    def _merge(self, segment: str) -> list[str]:
        """The pieces of `segment`: of neighbours whose union is a token, the best scored (leftmost of equals) merge until none is left."""
        id_of, scores = self._id_of, self._scores
        pieces = list(segment)  # a merged piece lies where its left half was; "" where nothing is any more
        n = len(pieces)
        after = list(range(1, n + 1))
        before = list(range(-1, n - 1))
        # (-score, left, right, length of the union): popped from the best score, then from the left
        candidates: list[tuple[float, int, int, int]] = []
        for left in range(n - 1):
            token_id = id_of.get(pieces[left] + pieces[left + 1])
            if token_id is not None:
                candidates.append((-scores[token_id], left, left + 1, 2))
        heapify(candidates)
        while candidates:
            _, left, right, length = heappop(candidates)
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != length:
                continue  # one of the halves has merged with another meanwhile
            pieces[left] += pieces[right]
            pieces[right] = ""
            follower = after[left] = after[right]
            if follower < n:
                before[follower] = left
            for a, b in ((before[left], left), (left, follower)):
                if a >= 0 and b < n:
                    union = pieces[a] + pieces[b]
                    token_id = id_of.get(union)
                    if token_id is not None:
                        heappush(candidates, (-scores[token_id], a, b, len(union)))
        return [piece for piece in pieces if piece]

    def _ids_of_piece(self, piece: str) -> list[int]:
        token_id = self._id_of.get(piece)
        if token_id is not None:
            return [token_id]
        byte_ids = [self._byte_ids[byte] for byte in piece.encode("utf-8")]
        found = [i for i in byte_ids if i is not None]
        if len(found) == len(byte_ids):
            return found
        if self._unknown_id is not None:
            return [self._unknown_id]
        raise UsageError(f"the text holds {piece!r}, for which this model has neither a token nor byte tokens; leave it out")
