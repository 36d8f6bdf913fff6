"""Load a checkpoint's model, without a second copy of its weights in memory."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paligemma import kernels
from paligemma.checkpoint import memory
from paligemma.checkpoint.devices import dtype_name, resolve_device, resolve_dtype
from paligemma.checkpoint.files import CONFIG_FILE, missing_config, weight_files, wrap_os_errors
from paligemma.checkpoint.hub import Progress
from paligemma.checkpoint.layout import (
    EMBEDDING,
    HEAD,
    STORED_DTYPES,
    StoredTensor,
    check_head,
    check_tensors,
    main_dtype,
    read_headers,
    split_head,
)
from paligemma.config import PaliGemmaConfig
from paligemma.errors import CheckpointError, CodedError
from paligemma.modeling import PaliGemmaForConditionalGeneration

log = logging.getLogger("paligemma.checkpoint")


def load_model(
    folder: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    progress: Progress | None = None,
    trainable: bool = False,
) -> PaliGemmaForConditionalGeneration:
    """Load a checkpoint's model in `eval()` mode.

    On the CPU, weights in the requested dtype are memory-mapped copy-on-write, so the file is never changed. Other
    weights are read, converted and moved one tensor at a time.

    Args:
        folder: contains config.json and the weights, in any layout described in `checkpoint.layout`.
        device: "auto" (CUDA, else MPS, else CPU) or a device.
        dtype: "auto" (the stored dtype; if mixed, that of most weights), "float32", "bfloat16" or "float16".
        progress: called with ("loading", bytes done, total bytes) after each tensor.
        trainable: whether parameters require gradients.

    Raises:
        CheckpointError: before weights are read, if files are missing or corrupt, do not match config.json, or do not
            fit into memory.
        InputError: for a device or dtype that is not available.
    """
    opened = _open(Path(folder), device, dtype)
    _load_weights(opened, _ProgressCounter(progress, opened.tensors.values()))
    return opened.model.requires_grad_(trainable).eval()


def load_for_inference(
    folder: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    quantize: str | None = None,
    progress: Progress | None = None,
) -> tuple[PaliGemmaForConditionalGeneration, str]:
    """Load a checkpoint's model with the fastest linear layers for this machine.

    The linear layers of the decoder and the LM head may be replaced by packed or quantized ones, one at a time. Such a
    model cannot be trained, moved to another device, or saved.

    Args:
        quantize: None, or "int8" for int8 weights in the decoder and the LM head.
        folder, device, dtype, progress: see `load_model`.

    Returns:
        The model and the name of its backend, such as "bfloat16 (packed for oneDNN)".

    Raises:
        CheckpointError, InputError: see `load_model`.
    """
    opened = _open(Path(folder), device, dtype)
    model, tensors = opened.model, opened.tensors
    weights = _decoder_weights(opened)
    backend = _choose_backend(opened, weights.values(), quantize)
    if backend is None:
        _load_weights(opened, _ProgressCounter(progress, tensors.values()))
        name, float32_part = dtype_name(opened.dtype), "prefill"
    else:
        # The embedding is read twice: as the embedding and as the tied head.
        counter = _ProgressCounter(progress, [*tensors.values(), tensors[EMBEDDING]])
        _load_weights(opened, counter, skipped={f"{module}.weight" for module in weights} - {HEAD})
        readers = {module: partial(_read_unmapped, tensor) for module, tensor in weights.items()}
        with wrap_os_errors(opened.folder):
            kernels.replace_linears(model, readers, backend, lambda module: counter.add(weights[module]))
        model.activation_dtype = backend.activation_dtype
        name, float32_part = backend.name, "vision tower"
    if not kernels.has_fast_matmul(opened.device, opened.dtype):
        kernels.use_float32_matmul(model)
        name = f"{name}, {float32_part} in float32"
    return model.requires_grad_(False).eval(), name


@dataclass(frozen=True)
class _OpenCheckpoint:
    """A checkpoint with validated headers, before its weights are loaded.

    Attributes:
        model: on the meta device, without weights.
        tensors: stored tensors by parameter name, without the tied head.
        device, dtype: of the weights after loading.
    """

    folder: Path
    model: PaliGemmaForConditionalGeneration
    tensors: Mapping[str, StoredTensor]
    device: torch.device
    dtype: torch.dtype


def _open(folder: Path, device: str | torch.device, dtype: str | torch.dtype) -> _OpenCheckpoint:
    resolved_device, resolved_dtype = resolve_device(device), resolve_dtype(dtype)
    model = build_empty_model(read_config(folder))
    with wrap_os_errors(folder):
        tensors, head = split_head(read_headers(weight_files(folder)))
        check_tensors(tensors, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, folder)
        if head is not None:
            check_head(head, tensors[EMBEDDING])
    return _OpenCheckpoint(folder, model, tensors, resolved_device, resolved_dtype or main_dtype(tensors.values()))


def _decoder_weights(opened: _OpenCheckpoint) -> dict[str, StoredTensor]:
    """The stored weights of the linear layers of the decoder and the LM head, by module name."""
    linears = (name for name, module in opened.model.named_modules() if isinstance(module, nn.Linear))
    return {
        name: opened.tensors[EMBEDDING if f"{name}.weight" == HEAD else f"{name}.weight"]
        for name in linears
        if name.startswith("language_model.")
    }


def _choose_backend(
    opened: _OpenCheckpoint, weights: Collection[StoredTensor], quantize: str | None
) -> kernels.Backend | None:
    """Choose the backend; None for plain linear layers, also if there is not enough memory to pack them."""
    device, folder = opened.device, opened.folder
    backend = kernels.choose_backend(quantize, device, opened.dtype, weight_files(folder))
    if backend is None:
        return None
    sizes = [weight.num_elements for weight in weights]
    needed = (sum(sizes) + max(sizes)) * backend.weight_dtype.itemsize  # one weight exists twice while it is converted
    if quantize is not None:
        memory.require_memory(needed, device, backend.weight_dtype, str(folder))
    elif needed > memory.available_memory(device).available:
        log.warning("Not enough memory to pack the weights of %s; they are used unpacked.", folder)
        return None
    return backend


def read_config(folder: Path, name: str | None = None) -> PaliGemmaConfig:
    """Read the configuration of a checkpoint folder.

    Args:
        name: the checkpoint's name in messages; None: the folder.

    Raises:
        CheckpointError: if config.json is missing or describes an unsupported model.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise missing_config(str(folder))
    try:
        return PaliGemmaConfig.from_folder(folder)
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(
            "checkpoint.unsupported_config",
            "config.json of {name} cannot be used: {reason}",
            name=name or str(folder),
            reason=error if isinstance(error, CodedError) else str(error),
        ) from None


def build_empty_model(config: PaliGemmaConfig) -> PaliGemmaForConditionalGeneration:
    """Build the model on the meta device, which allocates no memory for weights."""
    with torch.device("meta"), _SkipInitialization():
        return PaliGemmaForConditionalGeneration(config)


class _SkipInitialization(TorchFunctionMode):
    """Skip `torch.nn.init`, which imports PyTorch's compiler for meta tensors (several seconds and 70 MB)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return None
        return func(*args, **(kwargs or {}))


# Weights


class _ProgressCounter:
    """Report the bytes read to a progress callback."""

    def __init__(self, progress: Progress | None, tensors: Iterable[StoredTensor]) -> None:
        self._progress = progress
        self._total = sum(tensor.num_bytes for tensor in tensors)
        self._done = 0

    def add(self, tensor: StoredTensor) -> None:
        self._done += tensor.num_bytes
        if self._progress is not None:
            self._progress("loading", self._done, self._total)


def _load_weights(opened: _OpenCheckpoint, counter: _ProgressCounter, skipped: Collection[str] = ()) -> None:
    """Load the weights into the model; skipped parameters remain on the meta device."""
    loaded = {name: tensor for name, tensor in opened.tensors.items() if name not in skipped}
    check_memory(loaded.values(), opened.device, opened.dtype, opened.folder)
    with wrap_os_errors(opened.folder):
        state = _read_tensors(loaded, opened.device, opened.dtype, counter)
    empty = {name: torch.empty(opened.tensors[name].shape, device="meta") for name in skipped}
    opened.model.load_state_dict({**state, **empty, HEAD: state[EMBEDDING]}, strict=True, assign=True)
    opened.model.tie_weights()


def check_memory(tensors: Collection[StoredTensor], device: torch.device, dtype: torch.dtype, folder: Path) -> None:
    """Raise CheckpointError unless memory suffices for the weights that are not memory-mapped.

    The OS can evict memory-mapped weights and read them again; if they exceed the total memory, that happens for every
    token, so a warning is logged.
    """
    total = memory.available_memory(device).total
    copied = [tensor for tensor in tensors if not _is_memory_mapped(tensor, device, dtype)]
    needed = sum(tensor.num_elements * dtype.itemsize for tensor in copied)
    needed += max((tensor.num_bytes for tensor in copied), default=0)  # one tensor exists twice during conversion
    memory.require_memory(needed, device, dtype, str(folder), dtype_name(main_dtype(tensors)))
    mapped = sum(tensor.num_bytes for tensor in tensors) - sum(tensor.num_bytes for tensor in copied)
    if needed + mapped > total:
        log.warning(
            "The weights of %s need %s, but this machine has only %s of memory. They will be read from disk for every "
            "token, which is slow.",
            *(folder, memory.format_gigabytes(needed + mapped), memory.format_gigabytes(total)),
        )


def _is_memory_mapped(tensor: StoredTensor, device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and STORED_DTYPES[tensor.dtype] == dtype


def _read_tensors(
    tensors: Mapping[str, StoredTensor], device: torch.device, dtype: torch.dtype, counter: _ProgressCounter
) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for file in dict.fromkeys(tensor.file for tensor in tensors.values()):
        with safe_open(file, framework="pt") as opened:
            for name, tensor in tensors.items():
                if tensor.file != file:
                    continue
                is_mapped = _is_memory_mapped(tensor, device, dtype)
                weight = opened.get_tensor(tensor.key) if is_mapped else _read_unmapped(tensor)
                state[name] = weight.to(device=device, dtype=dtype)
                counter.add(tensor)
    return state


def _read_unmapped(tensor: StoredTensor) -> Tensor:
    """Read a tensor through its own memory map, which is released with the tensor."""
    with safe_open(tensor.file, framework="pt") as opened:
        return opened.get_tensor(tensor.key)
