"""Invariants 2 and 3 on the dataset itself: a sample is a function of its number; a longer run extends a shorter."""

import hashlib

import pytest

from megatron_mlmclm.errors import UserError
from megatron_mlmclm.loop.datasets import train_dataset, validation_dataset
from megatron_mlmclm.loop.request import read_request

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
