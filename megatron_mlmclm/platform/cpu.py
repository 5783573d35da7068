"""Megatron on a CPU with gloo, through its own code paths. With CUDA present nothing here is applied.

Every patch is a row of `torch_patches` or `megatron_patches` with its reason. Those of torch go in before megatron is
imported; those of megatron right after. torch's own modules must keep seeing that there is no CUDA (dynamo and pinned
memory break otherwise), so questions such as `is_available` are answered by who asks.
"""

import contextlib
import ctypes
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_mlmclm.platform import kernels
from megatron_mlmclm.platform.doctor import has_file

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Patch:
    """`owner.name` is replaced by `value`, because of `reason`."""

    owner: Any
    name: str
    value: Any
    reason: str

    def apply(self) -> None:
        setattr(self.owner, self.name, self.value)


def prepare() -> list[Patch]:
    """Let megatron run on this machine and return the patches that took: none where CUDA is present."""
    # Megatron refuses tensor parallelism without it on devices before Blackwell; read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # says once a rank that CUDA is absent
    if torch.cuda.is_available():
        return []
    if "megatron.core" in sys.modules:
        raise RuntimeError("platform.prepare() must run before megatron is imported")
    keep_memory()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # megatron's jit decorators would compile for a device that is not there
    hide_transformer_engine()
    patches = torch_patches()
    for patch in patches:
        patch.apply()
    CudaNamesMeanCpu().__enter__()
    of_megatron = megatron_patches()
    for patch in of_megatron:
        patch.apply()
    return patches + of_megatron


def keep_memory() -> None:
    """Let glibc keep freed memory: each step asks for the same tensors, and fresh pages cost as much as the arithmetic.

    Measured on 2 cores at a vocabulary of 128,256: a product of 300 MB into fresh memory takes up to twice as long.
    """
    trim_threshold, mmap_max = -1, -4  # names of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Keep the warnings of megatron's and torch's imports (a dozen lines about what is not installed) to ourselves."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # says once a process that CUDA is absent
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def hide_transformer_engine() -> None:
    """Without CUDA, make `import transformer_engine` fail: megatron's local layer spec would take TE's norm from it.

    Enough for code that only reads megatron's files. Nothing happens where CUDA is present.
    """
    if not torch.cuda.is_available():
        sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]


def transformer_implementation() -> str:
    """Which layers run here: "cpu", "cuda" (local layers on a GPU without Transformer Engine) or "te"."""
    # The patched question answers a caller that is not megatron with the truth.
    if not torch.cuda.is_available():
        return "cpu"
    return "te" if has_file("transformer_engine", "pytorch") else "cuda"


class CudaNamesMeanCpu(TorchFunctionMode):
    """`device="cuda"`, `.cuda()` and `.to("cuda")` give CPU tensors; `tensor.type()` keeps the CUDA spelling.

    The distributed optimizer sorts its parameters by `tensor.type()`, for which only `torch.cuda.*` names exist. Memory
    is not pinned, for want of a driver: Megatron asks for it when it cuts rotary embeddings for context parallelism.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _Idle:
    """A stream or event where there is nothing to wait for. Any method may be called, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0.0 if name == "elapsed_time" else None


@contextlib.contextmanager
def _no_stream(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _for_megatron(answer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """A question that gets `answer` when a megatron module asks, and the truth otherwise."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return answer if asker.split(".")[0] == "megatron" else original(*args, **kwargs)

    return ask


def _always(answer: Any) -> Callable[..., Any]:
    """A function of its own for each patch: dynamo's tables refuse one object under two torch names."""
    return lambda *_, **__: answer


def _rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _seed_cpu(seed: int) -> None:
    torch.random.default_generator.manual_seed(int(seed))


@dataclass(frozen=True)
class _NoDevice:
    """Properties of a device older than any: megatron then asks for nothing special."""

    major: int = 0
    minor: int = 0
    total_memory: int = 0


class _Zeros(dict):
    def __missing__(self, key: str) -> int:
        return 0


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A reduce-scatter or all-gather of one tensor into another that does nothing where both are the same memory."""

    def call(output: torch.Tensor, own: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        same = output.data_ptr() == own.data_ptr() and output.numel() == own.numel()
        return None if same else collective(output, own, *args, **kwargs)

    return call


def _scale(_chunk_size: int, _noop_flag: Any, tensors: list[list[torch.Tensor]], scale: Any) -> None:
    """As Apex's `multi_tensor_scale`: each tensor of the first list times `scale` into that of the second."""
    for source, target in zip(*tensors, strict=True):
        torch.mul(source, scale, out=target)


def torch_patches() -> list[Patch]:
    """What has to change in `torch.cuda` before megatron is imported."""
    cuda = torch.cuda
    idle = "there is no stream to order or wait for"
    count = "memory counters: nothing is counted on a CPU"
    rng = "the CPU generator plays the device generator's part"
    return [
        Patch(cuda, "is_available", _for_megatron(True, cuda.is_available), "megatron asserts CUDA at start"),
        Patch(cuda, "device_count", _for_megatron(1, cuda.device_count), "no model parallel groups without a device"),
        Patch(cuda, "current_device", _always(CPU), "megatron places tensors by it"),
        Patch(cuda, "set_device", _always(None), "one CPU"),
        Patch(cuda, "synchronize", _always(None), idle),
        Patch(cuda, "empty_cache", _always(None), idle),
        Patch(cuda, "Stream", type("Stream", (_Idle,), {}), idle),
        Patch(cuda, "Event", type("Event", (_Idle,), {}), idle),
        Patch(cuda, "stream", _no_stream, idle),
        Patch(cuda, "set_stream", _always(None), idle),
        Patch(cuda, "current_stream", _always(_Idle()), idle),
        Patch(cuda, "default_stream", _always(_Idle()), idle),
        Patch(cuda, "memory_allocated", _always(0), count),
        Patch(cuda, "memory_reserved", _always(0), count),
        Patch(cuda, "max_memory_allocated", _always(0), count),
        Patch(cuda, "max_memory_reserved", _always(0), count),
        Patch(cuda, "reset_peak_memory_stats", _always(None), count),
        Patch(cuda, "memory_stats", _always(_Zeros()), count),
        Patch(cuda, "device_memory_used", _always(0), count),
        Patch(cuda, "get_rng_state", _rng_state, rng),
        Patch(cuda, "set_rng_state", _set_rng_state, rng),
        Patch(cuda.random, "get_rng_state", _rng_state, rng),
        Patch(cuda, "manual_seed", _seed_cpu, rng),
        Patch(cuda, "get_device_capability", _always((0, 0)), "asked when arguments are checked"),
        Patch(cuda, "get_device_properties", _always(_NoDevice()), "asked when arguments are checked"),
    ]


def megatron_patches() -> list[Patch]:
    """What has to change in megatron itself, once imported. Imports megatron (about 8 s)."""
    from megatron_mlmclm.platform.adam import FusedLayoutAdam

    random = importlib.import_module("megatron.core.tensor_parallel.random")
    optimizer = importlib.import_module("megatron.core.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    mlp = importlib.import_module("megatron.core.transformer.mlp")
    rope = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    clip = importlib.import_module("megatron.core.optimizer.clip_grads")
    helpers = importlib.import_module("megatron.core.datasets.utils")
    loads = distributed.DistributedOptimizer.load_parameter_state_from_dp_reshardable
    adam = "torch's Adam keeps its step per parameter; the distributed optimizer's checkpoint wants it per group"
    fusion = "without it every gradient is written to memory of its own first, and then added"
    halves = "halves would be copied together, forward and backward"
    alone = "gloo copies all gradients twice where a group of one has nothing to exchange"
    return [
        Patch(buffers, "dist_reduce_scatter_func", _unless_alone(buffers.dist_reduce_scatter_func), alone),
        Patch(buffers, "dist_all_gather_func", _unless_alone(buffers.dist_all_gather_func), alone),
        Patch(clip, "multi_tensor_scale_impl", _scale, "clipping would write each gradient to new memory and back"),
        Patch(layers, "fused_weight_gradient_mlp_cuda", kernels.GradAccumulation, fusion),
        Patch(layers, "_grad_accum_fusion_available", True, fusion),
        Patch(mlp, "bias_swiglu_impl", kernels.swiglu, halves),
        Patch(rope, "_apply_rotary_pos_emb_bshd", kernels.rotary(rope._apply_rotary_pos_emb_bshd), halves),
        Patch(random, "_set_cuda_rng_state", _set_rng_state, "see get_rng_state"),
        Patch(optimizer, "Adam", FusedLayoutAdam, adam),
        Patch(optimizer, "USING_PYTORCH_OPTIMIZER", False, adam),
        Patch(distributed, "Adam", FusedLayoutAdam, adam),
        Patch(distributed, "HAVE_APEX_OR_TE", True, adam),
        Patch(distributed, "USING_APEX_OPTIMIZER", True, adam),
        Patch(
            distributed.DistributedOptimizer,
            "load_parameter_state_from_dp_reshardable",
            torch.no_grad()(loads),
            "lacks no_grad upstream: loading fp32 weights raises on a leaf that requires grad",
        ),
        Patch(helpers, "compile_helpers", _always(None), "the wheel ships the compiled helper but no Makefile"),
    ]
