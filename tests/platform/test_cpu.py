"""The CPU platform: nothing where CUDA is present, and Megatron's optimizer layout where it is not."""

import sys

import pytest
import torch

from megatron_mlmclm.platform import cpu, prepare
from megatron_mlmclm.platform.adam import FusedLayoutAdam


def test_with_cuda_present_nothing_is_patched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    modules = set(sys.modules)
    assert prepare() == []
    assert {name: getattr(torch.cuda, name) for name in dir(torch.cuda)} == before
    assert not {name for name in set(sys.modules) - modules if name.startswith("megatron.")}
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")  # still means CUDA, and there is none here


def test_every_patch_has_a_reason_and_a_target_that_exists():
    patches = cpu.torch_patches()
    assert len({(id(patch.owner), patch.name) for patch in patches}) == len(patches)
    for patch in patches:
        assert patch.reason
        assert hasattr(patch.owner, patch.name) or patch.name == "device_memory_used"


def test_torch_itself_still_sees_that_there_is_no_cuda():
    patched = {patch.name: patch.value for patch in cpu.torch_patches()}
    as_megatron = {"__name__": "megatron.core.x", "ask": patched["is_available"]}
    assert patched["is_available"]() is torch.cuda.is_available()
    assert eval("ask()", as_megatron) is True  # noqa: S307 - the question is answered by who asks


def test_cuda_names_mean_the_cpu():
    with cpu.CudaNamesMeanCpu():
        made = torch.zeros(2, device="cuda")
        moved = torch.ones(2).cuda().to("cuda").to(torch.device("cuda", 0), torch.float64)
        assert made.type() == "torch.cuda.FloatTensor"
    assert (made.device.type, moved.device.type, moved.dtype) == ("cpu", "cpu", torch.float64)
    assert made.type() == "torch.FloatTensor"


def test_a_group_of_one_exchanges_nothing_and_larger_groups_do():
    patches = {patch.name: patch.value for patch in cpu.megatron_patches()}
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        whole = torch.ones(4)
        assert patches[name](whole, whole.view(-1)) is None
        with pytest.raises(ValueError, match="process group"):  # torch's own, which has no world here
            patches[name](whole[:2], whole)


def test_gradients_are_clipped_in_place_as_megatron_clips_them():
    clip = {patch.name: patch.value for patch in cpu.megatron_patches()}["multi_tensor_scale_impl"]
    first, second = torch.arange(3.0), torch.ones(2, 2)
    kept = second.clone()
    other = torch.empty(2, 2)
    clip(2048 * 32, None, [[first, second], [first, other]], 0.5)
    assert first.tolist() == [0.0, 0.5, 1.0]
    assert torch.equal(other, kept / 2)
    assert torch.equal(second, kept)


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_adam_is_torchs(decoupled):
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
    optimizer = FusedLayoutAdam([ours], adam_w_mode=decoupled, **settings)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], **settings)
    for _ in range(5):
        ours.grad = torch.randn(5, 3, generator=generator)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert optimizer.param_groups[0]["step"] == 5
    assert set(optimizer.state[ours]) == {"exp_avg", "exp_avg_sq"}


def test_an_adam_that_is_saved_and_loaded_goes_on_the_same():
    def steps(optimizer, parameter, count):
        for _ in range(count):
            parameter.grad = parameter.detach() * 0.3 + 1.0
            optimizer.step()

    whole, first, second = (torch.nn.Parameter(torch.ones(4)) for _ in range(3))
    steps(FusedLayoutAdam([whole], lr=0.1), whole, 6)
    optimizer = FusedLayoutAdam([first], lr=0.1)
    steps(optimizer, first, 3)
    second.data.copy_(first.data)
    resumed = FusedLayoutAdam([second], lr=0.1)
    resumed.load_state_dict(optimizer.state_dict())
    steps(resumed, second, 3)
    assert torch.equal(whole, second)


def test_transformer_engine_is_hidden_without_cuda_only(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    with monkeypatch.context() as with_cuda:
        with_cuda.setattr(torch.cuda, "is_available", lambda: True)
        cpu.hide_transformer_engine()
        assert "transformer_engine" not in sys.modules
    cpu.hide_transformer_engine()
    with pytest.raises(ImportError):
        import transformer_engine  # noqa: F401
    monkeypatch.delitem(sys.modules, "transformer_engine")
