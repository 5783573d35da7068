"""Import, export and merge in one process: what comes out is what went in, in every form that it can take."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline

from megatron_mlmclm.cli import dispatch
from megatron_mlmclm.convert.merge import mixed
from megatron_mlmclm.errors import UserError
from tests.hf_models import MODELS, classes, make
from tests.parallel.fixed import fixed_sequences

SENTENCE_TRANSFORMERS = importlib.util.find_spec("sentence_transformers") is not None


@pytest.fixture(scope="module")
def imported(corpus, tmp_path_factory):
    """name of a model -> (its folder, the checkpoint imported from it), each made once."""
    folder, done = tmp_path_factory.mktemp("imported"), {}

    def get(name: str, **more) -> tuple[Path, Path]:
        if name not in done:
            source = make(name, folder / f"{name}-hf", corpus.tokenizer, **more)
            dispatch(["import-hf", str(source), "--output", str(folder / name)])
            done[name] = (source, folder / name)
        return done[name]

    return get


def export(checkpoint: Path, output: Path, *arguments: str) -> Path:
    dispatch(["export-hf", str(checkpoint), "--output", str(output), *arguments])
    return output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(fixed_sequences(32)).logits


@pytest.mark.parametrize("name", MODELS)
def test_every_family_comes_back_bit_for_bit(imported, tmp_path, name):
    family, _ = MODELS[name]
    source, checkpoint = imported(name)
    model_class = classes(family)[1]
    before, after = (
        model_class.from_pretrained(f) for f in (source, export(checkpoint, tmp_path / "out", "--as", family))
    )
    assert after.state_dict().keys() == before.state_dict().keys()
    for key, tensor in before.state_dict().items():
        assert torch.equal(after.state_dict()[key], tensor), key
    assert torch.equal(logits(after), logits(before))


def test_dtype_is_kept(corpus, tmp_path):
    source = make("llama", tmp_path / "llama", corpus.tokenizer, dtype=torch.bfloat16)
    dispatch(["import-hf", str(source), "--output", str(tmp_path / "ck")])
    before, after = weights(source), weights(export(tmp_path / "ck", tmp_path / "out", "--as", "llama"))
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["llama", "llama-mha", "smollm", "llama3", "qwen2"])
def test_a_decoder_becomes_an_encoder(imported, tmp_path, name):
    """EuroBERT with its weights is the decoder that sees both ways."""
    source, checkpoint = imported(name)
    encoder = AutoModelForMaskedLM.from_pretrained(export(checkpoint, tmp_path / "out"))
    assert type(encoder).__name__ == "EuroBertForMaskedLM"
    config_class, decoder_class = classes(MODELS[name][0])
    config = config_class.from_pretrained(source)
    config.is_causal = False
    decoder = decoder_class.from_pretrained(source, config=config)
    torch.testing.assert_close(logits(encoder), logits(decoder), atol=1e-5, rtol=0)
    assert encoder.config.attention_bias == (name in ("llama-mha", "qwen2"))


def test_an_encoder_as_a_llama_still_sees_both_ways(imported, tmp_path):
    source, checkpoint = imported("eurobert")
    model = classes("llama")[1].from_pretrained(export(checkpoint, tmp_path / "out", "--as", "llama"))
    assert model.config.is_causal is False
    torch.testing.assert_close(logits(model), logits(AutoModelForMaskedLM.from_pretrained(source)), atol=1e-5, rtol=0)
    _, decoder = imported("llama")
    again = export(decoder, tmp_path / "decoder", "--as", "llama")
    assert json.loads((again / "config.json").read_text())["is_causal"] is True


def test_what_a_family_cannot_say_is_refused(imported, tmp_path):
    _, checkpoint = imported("qwen3")
    with pytest.raises(UserError, match="norms on queries and keys.*--as qwen3"):
        export(checkpoint, tmp_path / "out")
    _, biased = imported("qwen2")
    with pytest.raises(UserError, match="biases.*--as llama"):
        export(biased, tmp_path / "out", "--as", "mistral")
    assert not (tmp_path / "out").exists()


def test_shards_are_as_small_as_asked(imported, tmp_path):
    _, checkpoint = imported("llama")
    out = export(checkpoint, tmp_path / "out", "--as", "llama", "--max-shard-size", "250KB")
    files = sorted(out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and all(file.stat().st_size < 250_000 + 4096 for file in files)
    for file in files:
        assert file.name == f"model-{files.index(file) + 1:05}-of-{len(files):05}.safetensors"
        assert {name for name, held in index["weight_map"].items() if held == file.name} == load_file(file).keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights(out).values())
    with pytest.raises(UserError, match="no size"):
        export(checkpoint, tmp_path / "again", "--max-shard-size", "much")


def test_the_sources_terms_are_carried_along(imported, tmp_path):
    _, checkpoint = imported("llama")
    out = export(checkpoint, tmp_path / "out")
    assert (out / "LICENSE").read_text() == "The terms of the source.\n"
    assert "A source." in (out / "SOURCE_README.md").read_text()
    card = (out / "README.md").read_text()
    assert "license: apache-2.0" in card and "pipeline_tag: fill-mask" in card


def without_mask(folder: Path) -> None:
    """The tokenizer keeps the piece [MASK], but it is no mask token: what a decoder's reserved piece is."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        values = json.loads((folder / name).read_text())
        values.pop("mask_token")
        (folder / name).write_text(json.dumps(values))


def test_a_decoders_tokenizer_gets_a_mask(llama, tmp_path):
    without_mask(llama)
    assert AutoTokenizer.from_pretrained(llama).mask_token is None
    dispatch(["import-hf", str(llama), "--output", str(tmp_path / "ck")])
    out = export(tmp_path / "ck", tmp_path / "out")
    fills = pipeline("fill-mask", model=str(out))("the people of the [MASK] states")
    assert len(fills) == 5
    assert json.loads((out / "config.json").read_text())["mask_token_id"] == 1


def test_a_mask_may_be_named_or_missing(llama, tmp_path, capsys):
    without_mask(llama)
    dispatch(["import-hf", str(llama), "--output", str(tmp_path / "named"), "--mask-piece", "~"])
    assert AutoTokenizer.from_pretrained(tmp_path / "named" / "tokenizer").mask_token == "~"
    text = (llama / "tokenizer.json").read_text().replace("[MASK]", "[OTHER]")
    (llama / "tokenizer.json").write_text(text)
    dispatch(["import-hf", str(llama), "--output", str(tmp_path / "none")])
    assert "--mask-piece" in capsys.readouterr().out
    with pytest.raises(UserError, match="no mask token"):
        export(tmp_path / "none", tmp_path / "out")
    assert export(tmp_path / "none", tmp_path / "out", "--as", "llama").is_dir()


def test_the_folder_of_sentence_transformers(imported, tmp_path):
    _, checkpoint = imported("llama")
    out = export(checkpoint, tmp_path / "out", "--as", "sentence-transformers")
    modules = json.loads((out / "modules.json").read_text())
    assert [(each["path"], each["type"].rpartition(".")[2]) for each in modules] == [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
    ]
    pooling = json.loads((out / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 48
    assert [mode for mode, on in pooling.items() if mode.startswith("pooling_mode") and on] == [
        "pooling_mode_mean_tokens"
    ]
    assert json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"] == 32
    assert type(AutoModel.from_pretrained(out)).__name__ == "EuroBertModel"


@pytest.mark.skipif(not SENTENCE_TRANSFORMERS, reason="sentence-transformers is not installed")
def test_sentence_transformers_takes_the_mean(imported, tmp_path):
    from sentence_transformers import SentenceTransformer

    _, checkpoint = imported("llama")
    out = export(checkpoint, tmp_path / "out", "--as", "sentence-transformers")
    texts = ["the people of the united states", "war"]
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModel.from_pretrained(out).eval()
    for text, found in zip(texts, SentenceTransformer(str(out)).encode(texts), strict=True):
        with torch.no_grad():
            hidden = model(input_ids=tokenizer(text, return_tensors="pt")["input_ids"]).last_hidden_state
        torch.testing.assert_close(torch.from_numpy(found), hidden[0].mean(0), atol=1e-4, rtol=0)


def test_merging(llama, corpus, tmp_path):
    """Folders and the checkpoints imported from them give the same average; the ends are the models themselves."""
    other = make("llama", tmp_path / "other", corpus.tokenizer)
    tensors = {file: load_file(file) for file in other.glob("*.safetensors")}
    for file, held in tensors.items():
        save_file({name: tensor * 3 for name, tensor in held.items()}, file)
    for name, folder in (("a", llama), ("b", other)):
        dispatch(["import-hf", str(folder), "--output", str(tmp_path / name)])
    dispatch(["merge", str(llama), str(other), "--weight", "0.25", "--output", str(tmp_path / "folder")])
    dispatch(["merge", str(tmp_path / "a"), str(tmp_path / "b"), "--weight", "0.25", "--output", str(tmp_path / "ck")])
    first, second = weights(llama), weights(other)
    of_folders, of_checkpoints = (
        weights(tmp_path / "folder"),
        weights(export(tmp_path / "ck", tmp_path / "o", "--as", "llama")),
    )
    assert of_folders.keys() == first.keys() == of_checkpoints.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(of_folders[name], 0.75 * tensor + 0.25 * second[name])
        assert torch.equal(of_folders[name], of_checkpoints[name])
    assert classes("llama")[1].from_pretrained(tmp_path / "folder").config.num_hidden_layers == 4
    dispatch(["merge", str(llama), str(other), "--weight", "1", "--spherical", "--output", str(tmp_path / "end")])
    torch.testing.assert_close(weights(tmp_path / "end")["model.norm.weight"], second["model.norm.weight"])


def test_the_arc_keeps_the_length():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.nn.functional.normalize(torch.randn(64, generator=generator), dim=0).reshape(8, 8) for _ in range(2))
    half = mixed(a, b, weight=0.5, spherical=True)
    assert float(half.norm()) == pytest.approx(1.0, abs=1e-6)
    assert float((half * a).sum()) == pytest.approx(float((half * b).sum()), abs=1e-6)
    assert torch.equal(mixed(a, a, weight=0.3, spherical=True), mixed(a, a, weight=0.3, spherical=False))
    assert mixed(a.bfloat16(), b, weight=0.5, spherical=True).dtype == torch.bfloat16
