"""Tokenizers trained, loaded, and given a mask token; transformers must agree. Nothing is downloaded."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron_mlmclm.data import Tokenizer
from megatron_mlmclm.data.tokenizer_make import add_mask_token, train_bpe
from megatron_mlmclm.errors import UserError

TEXTS = ["Hello  wörld,\n\tthe encoder", " leading and trailing ", "東京 🙂", "", "[mask] [ MASK ]"]


def transformers_tokenizer(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def test_trained_one(tokenizer_folder):
    tokenizer = Tokenizer.load(tokenizer_folder)
    assert (tokenizer.pad_id, tokenizer.mask_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2, 3)
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.vocab_size == 320
    assert tokenizer.token_to_id("[MASK]") == 1 and tokenizer.id_to_token(3) == "[EOS]"


def test_round_trip_and_agreement_with_transformers(tokenizer_folder, corpus):
    ours, theirs = Tokenizer.load(tokenizer_folder), transformers_tokenizer(tokenizer_folder)
    texts = TEXTS + corpus[:50]
    encoded = ours.encode_batch(texts)
    assert [ours.decode(ids) for ids in encoded] == texts
    assert encoded == [theirs(text).input_ids for text in texts]
    assert [theirs.decode(ids) for ids in encoded] == texts
    assert (theirs.pad_token_id, theirs.mask_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2, 3)
    assert len(theirs) == ours.vocab_size
    assert "megatron_mlmclm" not in json.dumps(theirs.init_kwargs, default=str)


def test_mask_takes_the_space_before_it(tokenizer_folder):
    ours, theirs = Tokenizer.load(tokenizer_folder), transformers_tokenizer(tokenizer_folder)
    a, b = ours.encode_batch(["a", " b"])
    assert theirs("a [MASK] b").input_ids == ours.encode_batch(["a [MASK] b"])[0] == [*a, 1, *b]


def test_transformers_saves_what_we_load(tokenizer_folder, tmp_path):
    transformers_tokenizer(tokenizer_folder).save_pretrained(tmp_path / "t")
    again, first = Tokenizer.load(tmp_path / "t"), Tokenizer.load(tokenizer_folder)
    assert again.roles == first.roles
    assert again.encode_batch(TEXTS) == first.encode_batch(TEXTS)


def test_truncation_and_padding_in_the_file_are_ignored(tokenizer_folder, tmp_path):
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    (tmp_path / "t").mkdir()
    backend.save(str(tmp_path / "t" / "tokenizer.json"))
    assert Tokenizer.load(tmp_path / "t").encode_batch(TEXTS) == Tokenizer.load(tokenizer_folder).encode_batch(TEXTS)


def test_training_says_what_is_wrong_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="--vocab-size 100: at least 260"):
        train_bpe(iter(["x"]), 100, tmp_path / "t")
    with pytest.raises(UserError, match="a.jsonl:1"):
        train_bpe(broken(), 300, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []
    assert train_bpe(iter(["ab ab"]), 300, tmp_path / "t") < 300
    with pytest.raises(UserError, match="exists already"):
        train_bpe(iter(["x"]), 300, tmp_path / "t")


def broken():
    yield "fine"
    raise UserError("a.jsonl:1: bad")


def test_missing_and_broken_folders(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        Tokenizer.load(tmp_path / "none")
    with pytest.raises(UserError, match="tokenizer.json: no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer.json: not a tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not JSON"), ("[]", "not a JSON object"), ('{"eos_token": "</s>"}', "'</s>', which")]
)
def test_broken_settings(tmp_path, content, message):
    build(tmp_path / "t", [], {})
    (tmp_path / "t" / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        Tokenizer.load(tmp_path / "t")


def build(folder, specials, config, in_model=()):
    """A byte-level tokenizer; `specials` are added tokens, `in_model` pieces of the vocabulary that are not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate([*alphabet, *in_model])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(s, normalized=False) for s in specials])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    return folder


LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in (1, 0, 2))]
LLAMA_CONFIG = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}


@pytest.mark.parametrize(
    ("specials", "config", "in_model", "expected"),
    [
        (LLAMA, LLAMA_CONFIG, (), "<|reserved_special_token_0|>"),
        (LLAMA, LLAMA_CONFIG | {"pad_token": "<|reserved_special_token_0|>"}, (), "<|reserved_special_token_1|>"),
        (["<s>", "</s>"], {"eos_token": "</s>"}, ("[control_10]", "[control_8]"), "[control_8]"),
        (["<s>", "[INST]", "[control_9]"], {"bos_token": "<s>"}, (), "[control_9]"),
        (["[PAD]"], {"pad_token": "[PAD]"}, ("[unused1]", "[unused0]"), "[unused0]"),
        (["<mask>", "<unused0>"], {}, (), "<mask>"),
    ],
)
def test_add_mask_picks_a_reserved_piece(tmp_path, specials, config, in_model, expected):
    folder = build(tmp_path / "t", specials, config, in_model)
    (folder / "model.safetensors").write_text("weights are not the tokenizer's")
    before = Tokenizer.load(folder)
    choice = add_mask_token(folder, tmp_path / "out", None)
    after, theirs = Tokenizer.load(tmp_path / "out"), transformers_tokenizer(tmp_path / "out")
    assert choice == (expected, before.token_to_id(expected), False)
    assert after.mask_id == theirs.mask_token_id == choice.id
    assert after.vocab_size == before.vocab_size == len(theirs)
    assert after.backend.get_vocab() == before.backend.get_vocab() == theirs.get_vocab()
    assert after.encode_batch(TEXTS) == before.encode_batch(TEXTS)
    assert after.fingerprint == before.fingerprint  # data made before still belongs to it
    assert choice.id in after.special_ids
    space_mask = f"a {expected} b"
    assert theirs(space_mask).input_ids == after.encode_batch([space_mask])[0]
    assert after.encode_batch([space_mask])[0][1] == choice.id
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_the_fingerprint_tells_how_text_becomes_ids(tokenizer_folder, tmp_path):
    same = Tokenizer.load(tokenizer_folder).fingerprint
    settings = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    others = [
        {**settings, "normalizer": {"type": "Lowercase"}},
        {**settings, "model": {**settings["model"], "merges": []}},
    ]
    for number, changed in enumerate([{**settings, "truncation": None}, *others]):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "tokenizer.json").write_text(json.dumps(changed))
    assert Tokenizer.load(tmp_path / "0").fingerprint == same
    assert len({same, *(Tokenizer.load(tmp_path / f"{number}").fingerprint for number in (1, 2))}) == 3


def test_add_mask_to_a_llama_class(tmp_path):
    """transformers rebuilds such tokenizers from the vocabulary; the mask and its id must come through."""
    vocab = ["<unk>", "<s>", "</s>", "[INST]", "[control_8]", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a"]
    pieces = {piece: number for number, piece in enumerate(vocab)}
    backend = tokenizers.Tokenizer(models.BPE(pieces, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens([tokenizers.AddedToken(s, normalized=False) for s in vocab[:4]])
    (tmp_path / "t").mkdir()
    backend.save(str(tmp_path / "t" / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(config))
    assert add_mask_token(tmp_path / "t", tmp_path / "out") == ("[control_8]", 4, False)
    ours, theirs = Tokenizer.load(tmp_path / "out"), transformers_tokenizer(tmp_path / "out")
    assert ours.mask_id == theirs.mask_token_id == 4
    assert len(theirs) == ours.vocab_size == len(vocab)
    assert 4 in theirs("a [control_8] a").input_ids and 4 in ours.encode_batch(["a [control_8] a"])[0]


def test_add_mask_with_a_named_piece(tmp_path):
    folder = build(tmp_path / "t", ["<|im_end|>", "<repo_name>", "<jupyter_text>"], {"eos_token": "<|im_end|>"})
    with pytest.raises(UserError, match="no piece known to be reserved; give --piece, of: <repo_name>, <jupyter_text>"):
        add_mask_token(folder, tmp_path / "out")
    with pytest.raises(UserError, match="has no piece '<x>'"):
        add_mask_token(folder, tmp_path / "out", "<x>")
    with pytest.raises(UserError, match="is its eos_token"):
        add_mask_token(folder, tmp_path / "out", "<|im_end|>")
    assert not (tmp_path / "out").exists()
    assert add_mask_token(folder, tmp_path / "out", "<jupyter_text>").piece == "<jupyter_text>"
    assert transformers_tokenizer(tmp_path / "out").mask_token == "<jupyter_text>"


def test_add_mask_to_one_that_has_it_copies(tokenizer_folder, tmp_path):
    assert add_mask_token(tokenizer_folder, tmp_path / "out") == ("[MASK]", 1, True)
    names = sorted(path.name for path in tokenizer_folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert all((tmp_path / "out" / n).read_bytes() == (tokenizer_folder / n).read_bytes() for n in names)
    with pytest.raises(UserError, match="already"):
        add_mask_token(tokenizer_folder, tmp_path / "other", "[PAD]")


def test_add_mask_to_what_transformers_saved(tmp_path):
    """Folders with added_tokens_decoder and special_tokens_map.json (older transformers) change in every place."""
    folder = build(tmp_path / "t", LLAMA, LLAMA_CONFIG)
    ids = {token: Tokenizer.load(folder).token_to_id(token) for token in LLAMA}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    decoder = {str(i): {"content": token, **flags} for token, i in ids.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": decoder} | LLAMA_CONFIG
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps(LLAMA_CONFIG))
    choice = add_mask_token(folder, tmp_path / "out")
    theirs = transformers_tokenizer(tmp_path / "out")
    assert theirs.mask_token_id == choice.id and theirs.eos_token == "<|end_of_text|>"
    assert theirs(f"a {choice.piece}b").input_ids[1] == choice.id
