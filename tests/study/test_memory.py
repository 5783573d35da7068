"""Bytes of a rank against weights counted by hand."""

import pytest

from megatron_mlmclm.recipe import load_recipe
from megatron_mlmclm.study import plan
from megatron_mlmclm.study.memory import rank_state
from megatron_mlmclm.study.tables import on_this_machine

# Attention 4 * 8 * 8, MLP 3 * 8 * 16, two norms of 8: 656 a layer; 1,312 and the last norm.
LAYERS, ROWS = 2 * 656 + 8, 100


@pytest.fixture
def recipe(tmp_path):
    def make(*overrides):
        path = tmp_path / "r.yaml"
        path.write_text(
            "name: r\noutput: r\n"
            "model: {num_layers: 2, hidden_size: 8, ffn_hidden_size: 16, num_attention_heads: 2, seq_length: 32,"
            " vocab_size: 100}\n"
            "data: {tokenizer: t, train: d}\nbatch: {micro_batch_size: 4, global_batch_size: 16}\n"
            "optimizer: {lr: 1.0e-4}\n"
            "phases: [{objective: mlm, steps: 10, mask_ratio: 0.3}]\n"
        )
        return load_recipe(str(path), list(overrides))

    return make


def test_one_rank_holds_everything_in_full_precision(recipe):
    state = rank_state(recipe(), ROWS)
    everything = LAYERS + ROWS * 8 * (1 if recipe().model.tie_embeddings else 2)
    assert state.weights == state.gradients == 4 * everything
    assert state.optimizer == 8 * everything
    assert state.logits == 4 * 32 * ROWS * 4


def test_ranks_share_layers_and_vocabulary(recipe):
    cut = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2", "precision=bf16")
    state = rank_state(recipe(*cut), ROWS)
    largest = LAYERS / 4 + ROWS * 8 / 2  # the first stage's embedding, or the last one's head
    assert (state.weights, state.gradients, state.optimizer) == (2 * largest, 4 * largest, 12 * largest)
    assert state.logits == 4 * 32 * ROWS / 2 * 4


def test_time_at_the_ceiling(recipe):
    each = plan(recipe())
    assert "30.0 minutes at an MFU of 100%" in on_this_machine(each, each.flops / 1800)
    assert "2.0 hours at an MFU of 100%" in on_this_machine(each, each.flops / 7200)
