"""Samples that tell their documents apart: `documents` and `packed`."""

import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_mlmclm.data import (
    DocumentStream,
    EncoderDataset,
    IndexedWriter,
    PackedStream,
    Reading,
    Sources,
    TokenStream,
    open_stream,
)
from megatron_mlmclm.data.pack import pack
from megatron_mlmclm.objectives import Clm, PseudoLikelihood, hash_key
from tests.objectives.common import MASKED, SELECTIONS, SPECIAL, VOCABULARY, chosen_by

EOS, PAD = 2, 3
TEXTS = st.lists(st.lists(st.integers(4, 99), max_size=40), min_size=2, max_size=30)
FOLDER = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(folder, texts) -> str:
    with IndexedWriter(folder / "d", np.uint16) as writer:
        for text in texts:
            writer.add_document([*text, EOS])
    return str(folder / "d")


def packed(folder, texts, seq_length) -> PackedStream:
    prefix = write(folder, texts)
    pack(prefix, seq_length)
    return PackedStream(prefix, seq_length, PAD)


@FOLDER
@given(texts=TEXTS, seq_length=st.integers(1, 50))
def test_packed_samples_hold_each_document_once(tmp_path, texts, seq_length):
    stream = packed(tmp_path, texts, seq_length)
    found = []  # text of every document in every sample
    for index in range(stream.n_samples):
        tokens, documents = stream.sample(index), stream.documents(index)
        assert tokens.shape == documents.shape == (seq_length + 1,)
        read = documents[:-1]
        filled = int((read >= 0).sum())
        assert filled >= 1
        assert (read[:filled] >= 0).all() and (tokens[:-1][filled:] == PAD).all()
        assert read[0] == 0 and set(np.diff(read[:filled])) <= {0, 1}
        found += [tokens[:-1][read == number].tolist() for number in range(read.max() + 1)]
    pieces = []
    for text in texts:
        whole = [*text, EOS]
        pieces += [whole[at : at + seq_length] for at in range(0, len(whole), seq_length)]
    assert sorted(found) == sorted(pieces)


@FOLDER
@given(texts=TEXTS, seq_length=st.integers(1, 50))
def test_clm_on_packed_predicts_each_token_but_the_first_of_each_document_once(tmp_path, texts, seq_length):
    stream = packed(tmp_path, texts, seq_length)
    predicted = []
    for index in range(stream.n_samples):
        documents = stream.documents(index)
        sample = Clm().make(stream.sample(index), 0, 0, documents)
        assert (documents[:-1][sample.predicted] == documents[1:][sample.predicted]).all()
        predicted += sample.labels[sample.predicted].tolist()
    assert sorted(predicted) == sorted(token for text in texts for token in [*text, EOS][1:])


@FOLDER
@given(texts=TEXTS, seq_length=st.integers(1, 30), data=st.data())
def test_documents_are_those_of_the_data_and_samples_those_of_cut(tmp_path, texts, seq_length, data):
    prefix = write(tmp_path, texts)
    total = sum(len(text) + 1 for text in texts)
    seq_length = min(seq_length, total - 1)
    stream, cut = DocumentStream(prefix, seq_length), TokenStream(prefix, seq_length)
    assert stream.n_samples == cut.n_samples
    index = data.draw(st.integers(0, cut.n_samples - 1))
    assert stream.sample(index).tolist() == cut.sample(index).tolist()
    owner = np.repeat(np.arange(len(texts)), [len(text) + 1 for text in texts])
    here = owner[index * seq_length : (index + 1) * seq_length + 1]
    assert stream.documents(index).tolist() == (here - here[0]).tolist()
    sample = Clm().make(stream.sample(index), 0, 0, stream.documents(index))
    assert sample.predicted.tolist() == (here[1:] == here[:-1]).tolist()


def test_documents_of_real_data_are_those_of_its_index(corpus_data):
    stream = DocumentStream(corpus_data, 64)
    edges = set(np.cumsum(stream.reader.document_lengths()).tolist())
    assert stream.n_samples > 40
    for index in range(stream.n_samples):
        steps = np.flatnonzero(np.diff(stream.documents(index))) + 1 + 64 * index
        assert set(steps.tolist()) == {edge for edge in edges if 64 * index < edge <= 64 * index + 64}


@pytest.fixture(scope="module")
def corpus_data(tmp_path_factory, tokenizer_folder, corpus):
    from megatron_mlmclm.data.preprocess import preprocess

    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("\n".join(corpus))
    preprocess([str(folder / "text.txt")], str(tokenizer_folder), str(folder / "d"))
    return str(folder / "d")


@st.composite
def texts_with_documents(draw) -> tuple[np.ndarray, np.ndarray]:
    """S + 1 tokens and their documents, with padding or without."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    filler = draw(st.integers(0, 20))
    ids = draw(st.lists(st.integers(0, 99), min_size=sum(lengths) + filler + 1, max_size=sum(lengths) + filler + 1))
    documents = np.repeat([*range(len(lengths)), -1], [*lengths, filler + 1])
    return np.where(documents < 0, PAD, ids), documents


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", MASKED)
@given(sample=texts_with_documents(), ratio=st.floats(0.01, 1.0), key=st.integers(0, 2**128 - 1))
def test_masked_objectives_keep_to_text(name, selection, sample, ratio, key):
    tokens, documents = sample
    made = MASKED[name](ratio, selection=selection).make(tokens, key, 0, documents)
    chosen, read, owners = chosen_by(name, made), tokens[:-1], documents[:-1]
    firsts = np.diff(owners, prepend=-2) != 0
    assert not np.isin(read[chosen], SPECIAL).any()
    assert (owners[chosen] >= 0).all()
    assert (made.inputs[~chosen] == read[~chosen]).all()
    assert (made.labels[made.predicted] == read[chosen]).all()
    allowed = ~np.isin(read, SPECIAL) & (owners >= 0)
    if name == "mntp":
        allowed &= ~firsts
        assert not (chosen & firsts).any()
        assert (documents[:-1][made.predicted] == documents[1:][made.predicted]).all()
        if selection == "words":
            return  # whose words may all be a document's first
    assert not (chosen & ~allowed).any()
    assert chosen.any() == allowed.any()
    if selection in ("exact", "spans") and allowed.any():
        assert chosen.sum() == max(1, round(ratio * allowed.sum()))


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", MASKED)
@FOLDER
@given(texts=TEXTS, ratio=st.floats(0.01, 1.0), number=st.integers(0, 100))
def test_documents_hides_what_cut_hides(tmp_path, name, selection, texts, ratio, number):
    """Of independent tokens or words those that the rules let be; counts, where they are exact, go by what may be."""
    stream = DocumentStream(write(tmp_path, [*texts, [7] * 40]), 40)
    index, key = number % stream.n_samples, hash_key(number)
    objective = MASKED[name](ratio, selection=selection)
    tokens, documents = stream.sample(index), stream.documents(index)
    cut, made = objective.make(tokens, key), objective.make(tokens, key, 0, documents)
    if name != "mntp":
        assert made.inputs.tolist() == cut.inputs.tolist()
        assert made.predicted.tolist() == cut.predicted.tolist()
    elif selection == "bernoulli" and ratio > 0.5:
        firsts = np.diff(documents[:-1], prepend=-1) != 0
        kept = chosen_by(name, cut) & ~firsts
        assert not kept.any() or chosen_by(name, made).tolist() == kept.tolist()


def test_whole_words_end_with_their_document():
    """Id 3k begins a word; here 31 and 32 would go on the word of 30, but are another document's."""
    tokens, documents = np.array([30, 31, 32, 33, 34]), np.array([0, 0, 1, 1, 1])
    hidden = [MASKED["mlm"](0.5, selection="words").make(tokens, key, 0, documents).predicted for key in range(64)]
    assert {tuple(each.tolist()) for each in hidden} == {
        (a, a, b, c) for a in (True, False) for b in (True, False) for c in (True, False) if a or b or c
    }
    spared = [MASKED["mntp"](1.0, selection="words").make(tokens, key, 0, documents).predicted for key in range(8)]
    assert {tuple(each.tolist()) for each in spared} == {(False, False, True, False)}


def test_pseudo_likelihood_passes_over_padding():
    objective = PseudoLikelihood(VOCABULARY)
    tokens, documents = np.array([30, 31, 40, 40]), np.array([0, 0, -1, -1])
    assert [int(objective.make(tokens, 0, step, documents).predicted.sum()) for step in range(3)] == [1, 1, 0]


@pytest.mark.parametrize("packing", ["cut", "documents", "packed"])
def test_every_sample_of_a_run_has_the_same_keys(tmp_path, packing):
    prefix = write(tmp_path, [[10] * length for length in (3, 30, 7, 9, 1, 14)])
    pack(prefix, 8)
    stream = open_stream(prefix, 8, packing, PAD)
    dataset = EncoderDataset(1, lambda n: Reading(Sources([stream], [1.0], 1), n, 0, Clm(), 0, 0), 100)
    keys = {tuple(dataset[n]) for n in range(2 * stream.n_samples)}
    told = () if packing == "cut" else ("documents",)
    assert keys == {("inputs", "labels", "predicted", "weight", "prefix", "view", *told)}
    if told:
        documents = dataset[0]["documents"]
        assert (documents.dtype, documents.shape) == (np.int64, (8,))


def test_a_packed_stream_reopens_where_it_is_unpickled(tmp_path):
    stream = packed(tmp_path, [[10] * 5, [11] * 20, [12] * 3], 8)
    again = pickle.loads(pickle.dumps(stream))
    for index in range(len(stream)):
        assert again.sample(index).tolist() == stream.sample(index).tolist()
    assert again.fingerprint == stream.fingerprint
    with pytest.raises(IndexError):
        stream.sample(stream.n_samples)
