"""The networks compute what their papers say, start from the seed alone, and take batches of any size."""

import pytest
import torch

from training.config import ModelConfig
from training.dense.models import MODELS, DeepFM


def build(name, num_dense, dims, **settings):
    return MODELS[name](num_dense=num_dense, dims=dims, config=ModelConfig(name=name, **settings))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_one_logit_per_record(name, num_dense, rows):
    model = build(name, num_dense, [4, 4, 4], hidden=[8, 4])
    assert model(torch.ones(rows, num_dense), torch.ones(rows, 12)).shape == (rows,)


def test_dnn_takes_slots_of_different_widths():
    assert build("dnn", 2, [1, 5, 3], hidden=[4])(torch.ones(6, 2), torch.ones(6, 9)).shape == (6,)


def test_deepfm_without_its_mlp_is_the_factorisation_machine():
    model = build("deepfm", 2, [3, 3, 3], hidden=[4])
    assert isinstance(model, DeepFM)
    with torch.no_grad():
        for parameter in model.top.parameters():
            parameter.zero_()
        model.bias.fill_(0.5)
        model.linear.weight.copy_(torch.tensor([[2.0, -1.0]]))
        model.linear.bias.fill_(0.25)
        dense, rows = torch.randn(7, 2), torch.randn(7, 3, 3)
        pairs = sum((rows[:, i, 1:] * rows[:, j, 1:]).sum(1) for i in range(3) for j in range(i + 1, 3))
        expected = 0.75 + 2.0 * dense[:, 0] - dense[:, 1] + rows[:, :, 0].sum(1) + pairs
        torch.testing.assert_close(model(dense, rows.flatten(1)), expected)


def test_dlrm_feeds_every_pair_once_to_its_top():
    model = build("dlrm", 2, [4, 4], hidden=[3])
    assert model.pairs.T.tolist() == [[0, 1], [0, 2], [1, 2]]
    assert model.top[0].in_features == 4 + 3


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_embedding_element(name):
    rows = torch.randn(4, 12, requires_grad=True)
    model = build(name, 3, [4, 4, 4], hidden=[16])
    model(torch.randn(4, 3), rows).sum().backward()
    assert bool((rows.grad.abs().sum(0) > 0).all())
