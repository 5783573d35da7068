#!/usr/bin/env python3
"""Masked batches made, one thread: our `Mlm` under BERT's shares against transformers' and Megatron-Core's code.

    python tools/bench/masking.py [--sequences 32] [--length 2048] [--vocabulary 128256] [--rounds 7] [--json FILE]

Ours is what a loader does with tokens it has read: key, sample, and torch's collation of the batch. transformers'
`DataCollatorForLanguageModeling` is given lists (as datasets yield them), tensors or arrays, and once the special
tokens' mask its documentation asks for; nothing is padded. Of Megatron-Core it is `_create_masked_lm_predictions` of
its BERT dataset, one-token grams, without collation. Unit: million tokens of processor time per second.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from common import Step, compared, cpu_seconds, in_turns, make_parser, tell
from torch.utils.data import default_collate

from megatron_mlmclm.objectives import Corruption, Mlm, Vocabulary, hash_key

BATCHES = 8  # at a time, as a loader makes one after the other
RATIOS = (0.30, 0.15)
SHARES = {"mask": 0.8, "random": 0.1, "keep": 0.1}


def main() -> None:
    """Run the cases and print them; see the module's docstring."""
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = np.random.default_rng(0).integers(0, options.vocabulary - 2, (options.sequences, options.length + 1))
    tell(results(tokens, options.vocabulary, options.rounds), options.json)


def results(tokens: np.ndarray, vocabulary: int, rounds: int) -> Iterator[dict]:
    """Ours against each peer at each ratio; `tokens` int64 [sequences, length + 1]."""
    count = BATCHES * tokens[:, :-1].size

    def rate(step: Step) -> float:
        return count / cpu_seconds(lambda: [step() for _ in range(BATCHES)]) / 1e6

    for ratio in RATIOS:
        ours = ours_of(tokens, vocabulary, ratio)
        for name, peer in peers(tokens[:, :-1], vocabulary, ratio):
            ours(), peer()  # tables are made
            yield compared(f"MLM batch {ratio:.0%}, {name}", "Mtok/s", in_turns(ours, peer, rounds, rate))


def ours_of(tokens: np.ndarray, vocabulary: int, ratio: float) -> Step:
    """A batch as our dataset and a loader make it from tokens."""
    mask_id, pad_id = vocabulary - 2, vocabulary - 1
    objective = Mlm(Corruption(Vocabulary(vocabulary, mask_id, (mask_id, pad_id)), **SHARES), ratio)

    def make() -> dict:
        samples = []
        for index, row in enumerate(tokens):
            sample = objective.make(row, hash_key("mask", 1234, 0, 0, 0, index))
            samples.append({"inputs": sample.inputs, "labels": sample.labels, "predicted": sample.predicted})
        return default_collate(samples)

    return make


def peers(tokens: np.ndarray, vocabulary: int, ratio: float) -> Iterator[tuple[str, Step]]:
    """The collator in its forms, and Megatron-Core's where it can be imported; `tokens` int64 [sequences, length]."""
    from transformers import DataCollatorForLanguageModeling

    no_special = [0] * tokens.shape[1]
    forms = {
        "collator (torch), lists": ("pt", tokens.tolist()),
        "collator (torch), tensors": ("pt", list(torch.tensor(tokens))),
        "collator (numpy), arrays": ("np", list(tokens)),
        "collator (numpy), lists with special mask": (
            "np",
            [{"input_ids": ids, "special_tokens_mask": no_special} for ids in tokens.tolist()],
        ),
    }
    for name, (form, examples) in forms.items():
        collate = DataCollatorForLanguageModeling(
            tokenizer_of(vocabulary), mlm_probability=ratio, return_tensors=form, **collator_shares()
        )
        yield name, functools.partial(collate, examples)
    yield "Megatron-Core's BERT dataset", megatron_of(tokens, vocabulary, ratio)


def collator_shares() -> dict[str, float]:
    """Our shares by the collator's names."""
    return {"mask_replace_prob": SHARES["mask"], "random_replace_prob": SHARES["random"]}


@functools.cache
def tokenizer_of(vocabulary: int) -> "PreTrainedTokenizerFast":  # noqa: F821
    """A tokenizer of so many ids, whose last two are mask and padding."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {f"t{number}": number for number in range(vocabulary - 2)} | {"[M]": vocabulary - 2, "[P]": vocabulary - 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "t0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[M]", pad_token="[P]")


def megatron_of(tokens: np.ndarray, vocabulary: int, ratio: float) -> Step:
    """Megatron-Core's code for a sample's masks, on a dataset object without files."""
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset

    pieces = {number: f"t{number}" for number in range(vocabulary)}
    dataset = object.__new__(BERTMaskedWordPieceDataset)
    dataset.token_lookup = list(range(vocabulary))
    dataset.config = SimpleNamespace(
        tokenizer=SimpleNamespace(cls=-1, sep=-2, mask=vocabulary - 2, inv_vocab=pieces),
        masking_probability=ratio,
        masking_max_ngram=1,
        masking_do_full_word=False,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
    )
    rows = tokens.tolist()

    def make() -> list:
        states = (np.random.RandomState(1234 + index) for index in range(len(rows)))
        make_one: Callable = dataset._create_masked_lm_predictions
        return [make_one(row, len(row), state) for row, state in zip(rows, states, strict=True)]

    return make


if __name__ == "__main__":
    sys.exit(main())
