"""Mask filling on a tiny random EuroBERT with a word-level tokenizer, saved and loaded as an export would be."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import EuroBertConfig, EuroBertForMaskedLM, PreTrainedTokenizerFast

from megatron_mlmclm.data import IndexedReader, IndexedWriter
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.evaluate import fill_mask

SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
WORDS = [f"w{number}" for number in range(27)]
VOCAB = len(SPECIALS) + len(WORDS)
LENGTH = 16


def save_model(folder: Path, mask_token: str | None = "<mask>") -> Path:
    vocab = {word: number for number, word in enumerate(SPECIALS + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token=mask_token,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = EuroBertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        mask_token_id=4,
    )
    EuroBertForMaskedLM(config).save_pretrained(folder)
    return folder


def write_data(prefix: Path, documents: int, seed: int, ids: range = range(5, VOCAB)) -> str:
    generator = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            # squared: low ids are frequent, so that the unigram guess is better than chance
            draws = (generator.random(20) ** 2 * len(ids)).astype(np.int64) + ids.start
            writer.add_document(np.append(draws, 2))
    return str(prefix)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """(model folder, validation prefix, training prefix)."""
    folder = tmp_path_factory.mktemp("fill_mask")
    return save_model(folder / "model"), write_data(folder / "valid", 30, 1), write_data(folder / "train", 100, 2)


@pytest.fixture(scope="module")
def encoder(material: tuple[Path, str, str]) -> fill_mask.Encoder:
    return fill_mask.load_encoder(material[0])


def windows(encoder: fill_mask.Encoder, prefix: str, samples: int = 64, ratio: float = 0.3, seed: int = 0):
    return list(fill_mask.masked_windows(encoder, IndexedReader(prefix), samples, ratio, seed))


def test_scores_equal_a_direct_computation(encoder: fill_mask.Encoder, material: tuple[Path, str, str]):
    _, valid, train = material
    result = fill_mask.score_masks(encoder, valid, train, ratio=0.3, samples=8, seed=3)
    losses, right = [], []
    for tokens, hidden in windows(encoder, valid, 8, 0.3, 3):
        inputs = torch.tensor(np.where(hidden, 4, tokens))[None]
        with torch.inference_mode():
            log_probability = encoder.model(input_ids=inputs).logits[0].log_softmax(-1).numpy()
        for place in np.flatnonzero(hidden):
            losses.append(-log_probability[place, tokens[place]])
            right.append(log_probability[place].argmax() == tokens[place])
    assert result.positions == len(losses)
    assert result.mlm_loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert result.mask_top1 == pytest.approx(np.mean(right))


def test_unigram_is_smoothed_and_leaves_specials_out(encoder: fill_mask.Encoder, material: tuple[Path, str, str]):
    _, valid, train = material
    result = fill_mask.score_masks(encoder, valid, train, ratio=0.3, samples=8)
    train_tokens = [t for t in IndexedReader(train).tokens(0, IndexedReader(train).n_tokens) if t >= 5]
    valid_tokens = [t for t in IndexedReader(valid).tokens(0, IndexedReader(valid).n_tokens) if t >= 5]
    share = {t: (train_tokens.count(t) + 1) / (len(train_tokens) + len(WORDS)) for t in range(5, VOCAB)}
    assert result.unigram_loss == pytest.approx(np.mean([-math.log(share[t]) for t in valid_tokens]))
    guess = max(share, key=share.get)
    hidden = np.concatenate([tokens[mask] for tokens, mask in windows(encoder, valid, 8)])
    assert result.unigram_top1 == pytest.approx(np.mean(hidden == guess))


def test_masks_are_a_function_of_seed_and_place(encoder: fill_mask.Encoder, material: tuple[Path, str, str]):
    valid = material[1]
    everything = windows(encoder, valid, samples=10_000)
    assert len(everything) == IndexedReader(valid).n_tokens // LENGTH
    few = windows(encoder, valid, samples=2)
    half = len(everything) // 2
    for (tokens, hidden), (tokens_again, hidden_again) in zip(few, [everything[0], everything[half]], strict=True):
        assert (tokens == tokens_again).all()
        assert (hidden == hidden_again).all()
    other = windows(encoder, valid, samples=2, seed=1)
    assert any((a[1] != b[1]).any() for a, b in zip(few, other, strict=True))


def test_specials_are_never_masked(encoder: fill_mask.Encoder, material: tuple[Path, str, str]):
    for tokens, hidden in windows(encoder, material[1], ratio=1.0):
        assert (hidden == (tokens >= 5)).all()


def test_batches_keep_every_window(encoder: fill_mask.Encoder, material: tuple[Path, str, str], monkeypatch):
    monkeypatch.setattr(fill_mask, "TOKENS_PER_BATCH", 3 * LENGTH)
    found = windows(encoder, material[1], samples=7)
    shapes = [tokens.shape for tokens, _ in fill_mask.in_batches(iter(found))]
    assert shapes == [(3, LENGTH), (3, LENGTH), (1, LENGTH)]


def test_verb_writes_json_and_fills_sentences(material: tuple[Path, str, str], tmp_path: Path, capsys):
    model, valid, train = material
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("w1 [MASK] w2\n\nw3 w4 <mask>\n")
    output = tmp_path / "out.json"
    parser = argparse.ArgumentParser()
    fill_mask.add_arguments(parser)
    line = [model, "--data", valid, "--train-data", train, "--sentences", sentences, "--output", output]
    fill_mask.run(parser.parse_args([*map(str, line), "--samples", "4"]))
    written = json.loads(output.read_text())
    keys = {"mlm_loss", "unigram_loss", "mask_top1", "unigram_top1", "positions", "sentences"}
    assert set(written) == keys
    assert [sentence["text"] for sentence in written["sentences"]] == ["w1 [MASK] w2", "w3 w4 [MASK]"]
    for sentence in written["sentences"]:
        scores = [fill["score"] for fill in sentence["fills"]]
        assert len(scores) == 5
        assert scores == sorted(scores, reverse=True)
    assert "unigram guess" in capsys.readouterr().out


def test_mistakes_end_in_one_line(encoder: fill_mask.Encoder, material: tuple[Path, str, str], tmp_path: Path):
    _, valid, train = material
    with pytest.raises(UserError, match="config.json"):
        fill_mask.load_encoder(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no mask token"):
        fill_mask.load_encoder(save_model(tmp_path / "model", mask_token=None))
    with pytest.raises(UserError, match="--ratio"):
        fill_mask.score_masks(encoder, valid, train, ratio=0.0)
    with pytest.raises(UserError, match="vocabulary"):
        fill_mask.score_masks(encoder, write_data(tmp_path / "foreign", 3, 0, range(100, 200)), train)
    with pytest.raises(UserError, match="no such file"):
        fill_mask.score_masks(encoder, str(tmp_path / "missing"), train)
    (tmp_path / "two.txt").write_text("fine [MASK]\n[MASK] and [MASK]\n")
    with pytest.raises(UserError, match=r"two\.txt, line 2: 2 masks"):
        fill_mask.read_sentences(tmp_path / "two.txt", encoder.tokenizer)
