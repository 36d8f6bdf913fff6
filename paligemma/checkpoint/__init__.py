"""Find, download, check, load and save checkpoints.

A checkpoint is a folder in the hub's layout: config.json, `model.safetensors` or shards with an index, tokenizer.json.
Names, shapes and memory are checked from the files' headers before weights are read. Only safetensors weights are
supported: PyTorch's .bin and .pt files are pickles, which can execute code.
"""

from paligemma.checkpoint.devices import DTYPES, dtype_name, resolve_device, resolve_dtype
from paligemma.checkpoint.files import DOWNLOADED_FILES, INDEX_FILE, SINGLE_FILE, weight_files
from paligemma.checkpoint.find import (
    BUNDLED_FOLDER,
    CheckpointSource,
    find_checkpoint,
    is_bundled,
    resolve_local_path,
)
from paligemma.checkpoint.hub import Progress
from paligemma.checkpoint.layout import canonical_name
from paligemma.checkpoint.load import build_empty_model, load_for_inference, load_model, read_config
from paligemma.checkpoint.save import save_model
from paligemma.errors import CheckpointError

__all__ = [
    "BUNDLED_FOLDER",
    "DOWNLOADED_FILES",
    "DTYPES",
    "INDEX_FILE",
    "SINGLE_FILE",
    "CheckpointError",
    "CheckpointSource",
    "Progress",
    "build_empty_model",
    "canonical_name",
    "dtype_name",
    "find_checkpoint",
    "is_bundled",
    "load_for_inference",
    "load_model",
    "read_config",
    "resolve_device",
    "resolve_dtype",
    "resolve_local_path",
    "save_model",
    "weight_files",
]
