"""Invariants 2 and 3 on the dataset itself: a sample is a function of its number; a longer run extends a shorter."""

import hashlib
import shutil

import numpy as np
import pytest

from megatron_mlmclm.convert import Trunk
from megatron_mlmclm.data.pack import pack
from megatron_mlmclm.errors import UserError
from megatron_mlmclm.loop.datasets import train_dataset, validation_dataset
from megatron_mlmclm.loop.request import read_request
from megatron_mlmclm.loop.start import check_origin
from megatron_mlmclm.recipe.schema import StartSection

RECIPE = """
name: data
output: runs/none
model: {{num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 2, seq_length: 64}}
data: {{tokenizer: {tokenizer}, train: [{{path: {train}, weight: 3}}, {{path: {valid}, weight: 1}}], valid: {valid}}}
batch: {{micro_batch_size: 2, global_batch_size: 4}}
phases: [{{objective: clm, steps: 10}}, {{objective: mlm, steps: 10, mask_ratio: 0.4}}]
optimizer: {{lr: 1.0e-3}}
validation: {{samples: 8, objectives: [clm, mlm]}}
"""


@pytest.fixture
def request_for(corpus, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.format(tokenizer=corpus.tokenizer, train=corpus.train, valid=corpus.valid))
    return lambda *overrides: read_request(str(path), overrides, 1)


def digest(dataset, numbers) -> list[str]:
    hashes = []
    for n in numbers:
        sample = dataset[n]
        hashes.append(hashlib.sha256(sample["inputs"].tobytes() + sample["predicted"].tobytes()).hexdigest())
    return hashes


def test_a_sample_is_a_function_of_its_number(request_for):
    dataset, again = train_dataset(request_for()), train_dataset(request_for())
    forwards = digest(dataset, range(80))
    assert digest(again, reversed(range(80))) == forwards[::-1]
    assert len(set(forwards)) == 80


def test_longer_runs_and_more_phases_leave_the_first_samples_alone(request_for):
    reference = digest(train_dataset(request_for()), range(80))
    longer = request_for("phases.1.steps=500")
    more = request_for(
        "phases=[{objective: clm, steps: 10}, {objective: mlm, steps: 10, mask_ratio: 0.4}, {objective: clm, steps: 5}]"
    )
    assert digest(train_dataset(longer), range(80)) == reference
    assert digest(train_dataset(more), range(80)) == reference


def test_masks_do_not_know_where_the_switch_is(request_for):
    """A branch that starts its mlm elsewhere masks sample n as the whole run would (DESIGN 4a.3)."""
    early, late = (train_dataset(request_for(f"phases.0.steps={steps}")) for steps in (5, 10))
    assert digest(early, range(40, 60)) == digest(late, range(40, 60))


@pytest.mark.parametrize("change", ["seed=5", "phases.1.mask_seed=1"])
def test_another_seed_masks_otherwise(request_for, change):
    reference, other = (digest(train_dataset(request_for(*extra)), range(40, 60)) for extra in ((), (change,)))
    assert not set(reference) & set(other)


def test_no_special_token_is_ever_predicted(request_for):
    request = request_for()
    dataset = train_dataset(request)
    for n in range(40, 240):
        sample = dataset[n]
        assert not set(sample["labels"][sample["predicted"]]) & set(request.vocabulary.special_ids)


def test_validation_is_one_period_for_each_objective_whatever_the_run(request_for):
    dataset = validation_dataset(request_for())
    assert [dataset[n]["view"] for n in range(16)] == [2] * 8 + [3] * 8
    first = digest(dataset, range(16))
    assert digest(dataset, range(16, 32)) == first
    assert digest(validation_dataset(request_for("seed=99", "batch.global_batch_size=2")), range(16)) == first
    clm, mlm = dataset[0], dataset[8]
    assert clm["labels"][:-1].tolist() == mlm["labels"][1:].tolist()  # the same text under both


def test_an_id_beyond_the_vocabulary_is_refused(request_for):
    dataset = train_dataset(request_for())
    dataset._vocab_size = 40
    with pytest.raises(UserError, match="is not in the tokenizer's vocabulary of 40"):
        [dataset[n] for n in range(8)]


def test_documents_are_told_of_the_samples_that_cut_gives(request_for):
    long = "model.seq_length=4096"  # addresses are long
    cut, told = train_dataset(request_for(long)), train_dataset(request_for(long, "data.packing=documents"))
    for n in range(80):
        before, now = cut[n], told[n]
        documents = now.pop("documents")
        assert before["inputs"].tolist() == now["inputs"].tolist()
        assert not (now["predicted"] & ~before["predicted"]).any()
        lost = np.flatnonzero(before["predicted"] & ~now["predicted"])
        edges = np.flatnonzero(np.diff(documents))
        if n < 40:  # clm; whether the last label is of another document its sample does not say
            assert set(edges) <= set(lost) <= {*edges, 4095}
        else:
            assert not lost.size
    assert any(len(set(told[n]["documents"])) > 1 for n in range(40))


def test_packed_runs_read_samples_by_their_plans(request_for, corpus, tmp_path):
    with pytest.raises(UserError, match=r"train\.64\.pack: no such plan .*mlmclm pack .*train --seq-length 64"):
        request_for("data.packing=packed")
    for name in ("train", "valid"):
        for end in (".bin", ".idx", ".json"):
            shutil.copy(f"{getattr(corpus, name)}{end}", tmp_path / f"{name}{end}")
        pack(str(tmp_path / name), 64)
    data = f"data={{tokenizer: {corpus.tokenizer}, train: {tmp_path}/train, valid: {tmp_path}/valid, packing: packed}}"
    request = request_for(data)
    stream = request.streams[f"{tmp_path}/train"]
    dataset = train_dataset(request)
    epoch = [dataset[n] for n in range(80)]
    assert len({sample["inputs"].tobytes() for sample in epoch}) == min(80, stream.n_samples)
    assert digest(train_dataset(request_for(data, "phases.1.steps=50")), range(80)) == digest(dataset, range(80))
    evaluated = validation_dataset(request)
    for sample in [*epoch, *(evaluated[n] for n in range(16))]:
        padding = sample["documents"] < 0
        assert (np.diff(padding.astype(int)) >= 0).all()
        assert not (sample["predicted"] & padding).any()
        assert sample["predicted"].any()


def test_a_trunk_of_another_packing_is_no_trunk_unless_allowed(request_for):
    request = request_for("data.packing=documents", "seed=1234")
    old = {name: value for name, value in request.origin.items() if name != "packing"}
    trunk = Trunk("runs/a/iter_5", 5, 20, "", old, None)
    start = request.recipe.model_copy(update={"start": StartSection(checkpoint="runs/a")})
    with pytest.raises(UserError, match="packing was cut, the recipe has documents.*--allow packing"):
        check_origin(trunk, start, request.origin)
    check_origin(trunk, start, {**request.origin, "packing": "cut"})
    allowed = start.model_copy(update={"start": StartSection(checkpoint="runs/a", allow=["packing"])})
    check_origin(trunk, allowed, request.origin)
