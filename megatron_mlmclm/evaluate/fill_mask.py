"""`mlmclm fill-mask`: how well an exported encoder fills masks in held-out text, beside a unigram guess.

The model is loaded with transformers alone, so this measures the export as a user will meet it. Windows of the
model's own maximum length are cut from the validation stream (several documents may share one, as in training
without document boundaries); a keyed random subset of their ordinary tokens is replaced by the mask token.

The unigram model knows nothing but token frequencies (training data, add-one smoothing over the ordinary
vocabulary). An encoder that does not beat it has learnt nothing from context.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, pipeline

from megatron_mlmclm.aside import write_file
from megatron_mlmclm.data import IndexedReader
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.objectives import draw_u64, hash_key, threshold_u64

TOP_K = 5
TOKENS_PER_BATCH = 4096  # bounds the logits: 4,096 x 128,256 in fp32 are 2 GB
TOKENS_PER_READ = 1 << 22
MASK_IN_FILES = "[MASK]"  # accepted in sentence files whatever the tokenizer's own mask token is called


@dataclass
class FillMaskResult:
    """Losses in nats per token, accuracies in 0..1; the field names are the JSON's keys.

    `mlm_loss`, `mask_top1` and `unigram_top1` are over the same `positions` masked tokens; `unigram_loss` is over all
    ordinary tokens of the validation data.
    """

    mlm_loss: float
    unigram_loss: float
    mask_top1: float
    unigram_top1: float
    positions: int
    sentences: list[dict[str, Any]] = field(default_factory=list)  # {"text", "fills": [{"token", "score"}, ...]}


@dataclass(frozen=True)
class Encoder:
    """A masked LM with its tokenizer; `ordinary` [vocab] bool: which ids may be masked (not special)."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ordinary: np.ndarray

    @property
    def mask_id(self) -> int:
        """The id that hides a token."""
        return self.tokenizer.mask_token_id

    @property
    def max_length(self) -> int:
        """Tokens a window may hold, from the model's own config."""
        return self.model.config.max_position_embeddings


# ---------------------------------------------------------------------------------------------------------- loading


def load_encoder(model_dir: Path) -> Encoder:
    """Load `model_dir` (fp32, on a GPU if there is one). UserError: no such folder, not a masked LM, no mask token."""
    if not (model_dir / "config.json").is_file():
        raise UserError(f"{model_dir}: no config.json there; name a folder written by `mlmclm export-hf`")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        model = AutoModelForMaskedLM.from_pretrained(model_dir, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{model_dir}: transformers cannot load it as a masked LM with a tokenizer ({reason})"
        ) from error
    if tokenizer.mask_token_id is None:
        raise UserError(
            f"{model_dir}: its tokenizer has no mask token; add one with `mlmclm tokenizer` before training"
        )
    vocab = model.config.vocab_size
    if tokenizer.mask_token_id >= vocab:
        raise UserError(
            f"{model_dir}: the mask token's id {tokenizer.mask_token_id} is outside the model's vocabulary of {vocab}; "
            "export again with the tokenizer the model was trained with"
        )
    ordinary = np.ones(vocab, dtype=bool)
    ordinary[[i for i in tokenizer.all_special_ids if i < vocab]] = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Encoder(model.eval().to(device), tokenizer, ordinary)


def read_sentences(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The file's non-empty lines, with the tokenizer's mask token. UserError: unreadable, not one mask in a line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read it as UTF-8 text ({error})") from error
    sentences = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        text = line.strip().replace(MASK_IN_FILES, tokenizer.mask_token)
        if (masks := text.count(tokenizer.mask_token)) != 1:
            raise UserError(f"{path}, line {number}: {masks} masks; write exactly one {MASK_IN_FILES} in each line")
        sentences.append(text)
    return sentences


# ---------------------------------------------------------------------------------------------------------- masking


def masked_windows(
    encoder: Encoder, reader: IndexedReader, samples: int, ratio: float, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (tokens int64 [S], hidden bool [S]) for up to `samples` windows spread evenly over the data.

    What is masked in a window depends on the seed and the window's place alone, not on how many were asked for.
    """
    length = min(encoder.max_length, reader.n_tokens)
    available = reader.n_tokens // length
    count = min(samples, available)
    threshold = threshold_u64(ratio)
    for turn in range(count):
        sample = turn * available // count
        tokens = reader.tokens(sample * length, (sample + 1) * length)
        drawn = draw_u64(hash_key("fill-mask", seed, sample), length)
        yield tokens, (drawn < threshold) & encoder.ordinary[tokens]


def in_batches(
    windows: Iterator[tuple[np.ndarray, np.ndarray]],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Stack windows of one length into (tokens [B, S], hidden [B, S]), at most TOKENS_PER_BATCH tokens, B >= 1."""
    batch: list[tuple[np.ndarray, np.ndarray]] = []
    for window in windows:
        batch.append(window)
        if (len(batch) + 1) * len(window[0]) > TOKENS_PER_BATCH:
            yield np.stack([b[0] for b in batch]), np.stack([b[1] for b in batch])
            batch = []
    if batch:
        yield np.stack([b[0] for b in batch]), np.stack([b[1] for b in batch])


# ---------------------------------------------------------------------------------------------------------- scoring


def count_tokens(reader: IndexedReader, vocab: int, name: str) -> np.ndarray:
    """How often each id occurs, int64 [vocab]. UserError: an id the model does not know."""
    counts = np.zeros(vocab, dtype=np.int64)
    for start in range(0, reader.n_tokens, TOKENS_PER_READ):
        tokens = reader.tokens(start, min(start + TOKENS_PER_READ, reader.n_tokens))
        if (largest := int(tokens.max())) >= vocab:
            raise UserError(
                f"{name}: holds id {largest} but the model's vocabulary is {vocab}; wrong tokenizer or data"
            )
        counts += np.bincount(tokens, minlength=vocab)
    return counts


def unigram_baseline(train: np.ndarray, valid: np.ndarray, ordinary: np.ndarray) -> tuple[float, int]:
    """(cross-entropy in nats of the smoothed training frequencies over the validation tokens, most frequent id).

    All arrays [vocab]; special ids take no part. NaN when the validation data holds no ordinary token.
    """
    smoothed = np.where(ordinary, train + 1.0, 0.0)
    log_probability = np.log(smoothed, where=ordinary, out=np.zeros_like(smoothed)) - np.log(smoothed.sum())
    seen = np.where(ordinary, valid, 0)
    loss = -float(seen @ log_probability) / seen.sum() if seen.sum() else float("nan")
    return loss, int(smoothed.argmax())


@torch.inference_mode()
def score_batch(encoder: Encoder, tokens: np.ndarray, hidden: np.ndarray) -> tuple[float, int]:
    """(sum of the losses in nats, number right at top 1) over the `hidden` positions of `tokens`, both [B, S]."""
    inputs = np.where(hidden, encoder.mask_id, tokens)
    logits = encoder.model(input_ids=torch.from_numpy(inputs).to(encoder.model.device)).logits.cpu()
    rows = logits[torch.from_numpy(hidden)].float()
    targets = torch.from_numpy(tokens[hidden])
    loss = torch.nn.functional.cross_entropy(rows, targets, reduction="none")
    return float(loss.double().sum()), int((rows.argmax(dim=-1) == targets).sum())


def score_masks(
    encoder: Encoder, data: str, train_data: str, *, ratio: float = 0.15, samples: int = 64, seed: int = 0
) -> FillMaskResult:
    """Mask and score windows of `data`; token frequencies come from `train_data` (both prefixes of .bin and .idx)."""
    if not 0.0 < ratio <= 1.0:
        raise UserError(f"--ratio {ratio}: must be above 0 and at most 1")
    if samples < 1:
        raise UserError(f"--samples {samples}: must be at least 1")
    reader = IndexedReader(data)
    vocab = len(encoder.ordinary)
    valid_counts = count_tokens(reader, vocab, data)
    train_counts = count_tokens(IndexedReader(train_data), vocab, train_data)
    unigram_loss, guess = unigram_baseline(train_counts, valid_counts, encoder.ordinary)
    loss, right, guessed, positions = 0.0, 0, 0, 0
    for tokens, hidden in in_batches(masked_windows(encoder, reader, samples, ratio, seed)):
        batch_loss, batch_right = score_batch(encoder, tokens, hidden)
        loss, right = loss + batch_loss, right + batch_right
        guessed += int((tokens[hidden] == guess).sum())
        positions += int(hidden.sum())
    if positions == 0:
        raise UserError(f"{data}: no token was masked; raise --ratio or --samples, or use more text")
    return FillMaskResult(loss / positions, unigram_loss, right / positions, guessed / positions, positions)


def fill_sentences(encoder: Encoder, sentences: list[str]) -> list[dict[str, Any]]:
    """The five likeliest fills of each sentence's one mask: {"text", "fills": [{"token", "score"}, ...]}."""
    fill = pipeline("fill-mask", model=encoder.model, tokenizer=encoder.tokenizer, top_k=TOP_K)
    return [
        {
            "text": text.replace(encoder.tokenizer.mask_token, MASK_IN_FILES),
            "fills": [{"token": found["token_str"].strip(), "score": found["score"]} for found in fill(text)],
        }
        for text in sentences
    ]


# --------------------------------------------------------------------------------------------------------- printing


def print_result(result: FillMaskResult, console: Console) -> None:
    """Print the scores and, under them, each sentence with its fills."""
    table = Table(title=f"{result.positions:,} masked tokens", title_justify="left")
    for heading in ("", "loss (nats)", "top 1"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("model", f"{result.mlm_loss:.3f}", f"{result.mask_top1:.1%}")
    table.add_row("unigram guess", f"{result.unigram_loss:.3f}", f"{result.unigram_top1:.1%}")
    console.print(table)
    for sentence in result.sentences:
        fills = ", ".join(f"{fill['token']} {fill['score']:.0%}" for fill in sentence["fills"])
        console.print(f"{escape(sentence['text'])}\n    [bold]{escape(fills)}[/]", highlight=False, soft_wrap=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("model_dir", type=Path, metavar="MODEL_DIR", help="Hugging Face folder of an exported encoder")
    parser.add_argument("--data", required=True, metavar="PREFIX", help="held-out indexed data (without .bin, .idx)")
    parser.add_argument("--train-data", required=True, metavar="PREFIX", help="training data, for token frequencies")
    parser.add_argument("--ratio", type=float, default=0.15, help="share of tokens to mask (default: 0.15)")
    parser.add_argument("--samples", type=int, default=64, help="windows to score (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="which tokens are masked (default: 0)")
    parser.add_argument("--sentences", type=Path, metavar="FILE", help=f"lines with one {MASK_IN_FILES} each, to fill")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the result here, too")


def run(args: argparse.Namespace) -> None:
    """Score, fill, print, and write the JSON if asked."""
    encoder = load_encoder(args.model_dir)
    # Read before the scoring: a mistake in the file should not cost the minutes that come first.
    sentences = read_sentences(args.sentences, encoder.tokenizer) if args.sentences else []
    result = score_masks(encoder, args.data, args.train_data, ratio=args.ratio, samples=args.samples, seed=args.seed)
    if sentences:
        result.sentences = fill_sentences(encoder, sentences)
    print_result(result, Console())
    if args.output:
        text = json.dumps(asdict(result), indent=2, ensure_ascii=False) + "\n"
        write_file(args.output, text.encode())
