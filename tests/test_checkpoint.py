"""Find, check, load and save checkpoints, with the error of every failure."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paligemma import checkpoint
from paligemma.benchmarks.random_checkpoints import LAYOUTS, make_model, save_layout
from paligemma.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    canonical_name,
    find,
    find_checkpoint,
    layout,
    load,
    load_model,
    memory,
    save_model,
)
from paligemma.checkpoint.layout import EMBEDDING, HEAD
from paligemma.modeling import PaliGemmaForConditionalGeneration

CASES = ("paligemma1", "paligemma2")
POSITIONS = "vision_tower.vision_model.embeddings.position_embedding.weight"


@pytest.fixture(scope="module")
def references() -> dict[str, transformers.PaliGemmaForConditionalGeneration]:
    return {case: make_model(case) for case in CASES}


@pytest.fixture(scope="module")
def folders(references, tmp_path_factory) -> dict[str, Path]:
    """One read-only folder per case, in the hub's layout."""
    root = tmp_path_factory.mktemp("hub")
    return {case: save_layout(model, root / case) for case, model in references.items()}


@pytest.fixture
def folder(folders, tmp_path) -> Path:
    """A PaliGemma 1 in the hub's layout that the test may modify."""
    return Path(shutil.copytree(folders["paligemma1"], tmp_path / "model"))


@pytest.fixture
def sharded(references, tmp_path) -> Path:
    return save_layout(references["paligemma1"], tmp_path / "sharded", sharded=True)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor] | None]) -> None:
    """Change the tensors of a folder's single file."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE_FILE).items()}
    tensors = change(tensors) or tensors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE)


def edit_config(folder: Path, **sections: dict) -> None:
    data = json.loads((folder / "config.json").read_text())
    for section, changes in sections.items():
        data[section] = {**data[section], **changes}
    (folder / "config.json").write_text(json.dumps(data))


def assert_equals_reference(model: PaliGemmaForConditionalGeneration, reference: torch.nn.Module) -> None:
    theirs = {canonical_name(name): tensor for name, tensor in reference.named_parameters()}
    ours = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, theirs[name]), name


# Layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_all_layouts_load_the_same_tensors(references, case, layout, sharded, tmp_path):
    folder = save_layout(references[case], tmp_path / "model", layout, sharded=sharded)
    assert (folder / INDEX_FILE).exists() == sharded
    assert_equals_reference(load_model(folder, "cpu"), references[case])


@pytest.mark.parametrize("case", CASES)
def test_sparse_hub_config_loads(references, case, tmp_path):
    folder = save_layout(references[case], tmp_path / "model", sparse=True)
    assert "head_dim" not in json.loads((folder / "config.json").read_text())["text_config"]
    assert_equals_reference(load_model(folder, "cpu"), references[case])


def test_loaded_model_is_frozen_and_in_eval_mode(folder):
    model = load_model(folder, "cpu")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.language_model.lm_head.weight is model.language_model.get_input_embeddings().weight


def test_trainable_model_does_not_write_to_the_file(folder):
    before = (folder / SINGLE_FILE).read_bytes()
    model = load_model(folder, "cpu", trainable=True)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert (folder / SINGLE_FILE).read_bytes() == before


def test_unrelated_safetensors_files_are_ignored(references, sharded):
    save_file({"anything": torch.zeros(3)}, sharded / "adapter_model.safetensors")
    assert_equals_reference(load_model(sharded, "cpu"), references["paligemma1"])


def test_legacy_buffers_are_dropped(references, folder):
    def add_buffers(tensors: dict[str, Tensor]) -> None:
        tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(16)[None]
        tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(128)

    rewrite(folder, add_buffers)
    assert_equals_reference(load_model(folder, "cpu"), references["paligemma1"])


# Tied head --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [HEAD, "lm_head.weight"])
def test_head_equal_to_the_embedding_is_dropped(references, folder, name):
    rewrite(folder, lambda tensors: {**tensors, name: tensors[EMBEDDING].clone()})
    assert_equals_reference(load_model(folder, "cpu"), references["paligemma1"])


def test_head_in_a_wider_dtype_is_compared_in_the_narrower_one(folder):
    def halve(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        return {**narrow, HEAD: tensors[EMBEDDING]}

    rewrite(folder, halve)
    assert load_model(folder, "cpu").dtype == torch.bfloat16


def test_head_without_embedding_becomes_the_embedding(references, folder):
    rewrite(folder, lambda tensors: {HEAD if name == EMBEDDING else name: t for name, t in tensors.items()})
    assert_equals_reference(load_model(folder, "cpu"), references["paligemma1"])


def test_head_that_differs_in_the_last_block_is_rejected(folder, monkeypatch):
    monkeypatch.setattr(layout, "ROWS_PER_BLOCK", 100)

    def add_head(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][-1, -1] += 1

    rewrite(folder, add_head)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight in .* differs from .*embed_tokens\.weight"):
        load_model(folder, "cpu")


# Mismatches -------------------------------------------------------------------------------------------------------


def test_missing_and_unexpected_tensors_are_listed(folder):
    def corrupt(tensors: dict[str, Tensor]) -> None:
        del tensors["multi_modal_projector.linear.bias"]
        for index in range(11):
            tensors[f"extra.{index:02}"] = torch.zeros(1)

    rewrite(folder, corrupt)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, "cpu")
    message = str(caught.value)
    assert caught.value.code == "checkpoint.mismatch"
    assert "missing (1): multi_modal_projector.linear.bias" in message
    assert "unexpected (11): extra.00" in message
    assert "extra.07, and 3 more" in message and "extra.08" not in message


def test_paligemma_2_weights_are_rejected_for_a_paligemma_1_config(folders, folder):
    shutil.copy(folders["paligemma2"] / SINGLE_FILE, folder)
    with pytest.raises(CheckpointError, match=r"unexpected .*pre_feedforward_layernorm"):
        load_model(folder, "cpu")


def test_weights_of_another_resolution_are_rejected(folder):
    edit_config(folder, vision_config={"image_size": 112})
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, "cpu")
    assert f"{POSITIONS} must be (64, 48), got (16, 48)" in str(caught.value)


def test_other_vocabulary_size_is_rejected(folder):
    vocab_size = load_model(folder, "cpu").config.text_config.vocab_size
    edit_config(folder, text_config={"vocab_size": vocab_size - 64})
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, "cpu")
    assert f"{EMBEDDING} must be ({vocab_size - 64}, 64), got ({vocab_size}, 64)" in str(caught.value)


def test_integer_weights_are_rejected(folder):
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: {**tensors, name: tensors[name].to(torch.int8)})
    with pytest.raises(CheckpointError, match=r"wrong dtype .*up_proj\.weight must be F32, BF16, F16, got I8"):
        load_model(folder, "cpu")


def test_duplicate_tensor_is_rejected(folder):
    name = "multi_modal_projector.linear.bias"
    rewrite(folder, lambda tensors: {**tensors, f"model.{name}": tensors[name].clone()})
    with pytest.raises(CheckpointError, match="are stored for the same parameter"):
        load_model(folder, "cpu")


def test_mismatch_is_found_before_tensors_are_read(folder, monkeypatch):
    rewrite(folder, lambda tensors: {**tensors, "extra": torch.zeros(1)})
    monkeypatch.setattr(load, "_read_tensors", lambda *_: pytest.fail("tensors were read"))
    with pytest.raises(CheckpointError, match="unexpected"):
        load_model(folder, "cpu")


def test_tensor_only_listed_in_the_index_is_missing(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    tensors = load_file(shard)
    name, _ = tensors.popitem()
    save_file(tensors, shard)
    with pytest.raises(CheckpointError, match=rf"missing \(1\): .*{canonical_name(name).split('.')[-2]}"):
        load_model(sharded, "cpu")


# Broken files -----------------------------------------------------------------------------------------------------


def test_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    for use in (lambda: load_model(sharded, "cpu"), lambda: find_checkpoint(sharded)):
        with pytest.raises(CheckpointError, match=rf"{shard.name} is missing in .*download it again"):
            use()


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_truncated_shard_is_named(sharded, size):
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:size])
    message = f"{shard.name} is truncated or corrupt .*Delete .*{shard.name}, then copy"
    with pytest.raises(CheckpointError, match=message):
        load_model(sharded, "cpu")


@pytest.mark.parametrize("length", [2**64 - 1, 10**12, 2, 0])
def test_corrupt_header_is_rejected(folder, length):
    content = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(length.to_bytes(8, "little") + content[8:])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        load_model(folder, "cpu")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("not json", "checkpoint.bad_index"),
        ("{}", "checkpoint.bad_index"),
        ("[]", "checkpoint.bad_index"),
        *(
            (json.dumps({"weight_map": weight_map}), "checkpoint.bad_index_names")
            for weight_map in (
                {},
                {"a": "../../secret.safetensors"},
                {"a": "/secret.safetensors"},
                {"a": "folder/secret.safetensors"},
                {"a": ".."},
                {"a": ""},
                {"a": "pytorch_model.bin"},
                {"a": 5},
            )
        ),
    ],
)
def test_bad_index_is_rejected(sharded, content, code):
    (sharded / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"weight_map") as caught:
        load_model(sharded, "cpu")
    assert caught.value.code == code


def test_folder_without_config_is_rejected(folder):
    (folder / "config.json").unlink()
    for use in (lambda: load_model(folder, "cpu"), lambda: find_checkpoint(folder)):
        with pytest.raises(CheckpointError, match=r"has no config\.json\. Copy or download"):
            use()


def test_other_model_type_is_rejected(folder):
    (folder / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(CheckpointError, match="'llava'"):
        load_model(folder, "cpu")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_never_opened(folder, name):
    (folder / SINGLE_FILE).rename(folder / name)
    with pytest.raises(CheckpointError, match=f"only {name}. Pickle files can execute code and are never opened"):
        find_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "message"), [("model.Q4_K.gguf", "GGUF"), ("pt_224.npz", "big_vision"), ("adapter_config.json", "PEFT")]
)
def test_weights_of_other_software_are_rejected(folder, name, message):
    (folder / SINGLE_FILE).rename(folder / name)
    for call in (find_checkpoint, load_model):
        with pytest.raises(CheckpointError, match=message):
            call(folder)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq"])
def test_quantized_checkpoint_is_rejected_with_its_method(folder, method):
    data = {**json.loads((folder / "config.json").read_text()), "quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=rf"cannot be used: .*quantized.*{method}"):
        load_model(folder, "cpu")


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 10**9}, {"hidden_size": 10**6, "intermediate_size": 10**6}, {"hidden_size": -1}]
)
def test_absurd_sizes_are_rejected_before_a_model_is_built(folder, changes, monkeypatch):
    monkeypatch.setattr(load, "build_empty_model", lambda *_: pytest.fail("a model was built"))
    edit_config(folder, text_config=changes)
    with pytest.raises(CheckpointError, match=r"cannot be used: "):
        load_model(folder, "cpu")


def test_unreadable_folder_is_rejected(folder, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Permission denied.* Check its permissions"):
        find_checkpoint(folder)


def test_folder_without_weights_is_rejected(folder):
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        find_checkpoint(folder)


def test_folder_without_tokenizer_is_rejected(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        find_checkpoint(folder)
    (folder / "tokenizer.model").write_bytes(b"")  # is converted
    assert find_checkpoint(folder).folder == folder


# Dtypes, memory, progress -----------------------------------------------------------------------------------------


def test_stored_dtype_is_the_default(folder):
    rewrite(folder, lambda tensors: {name: tensor.half() for name, tensor in tensors.items()})
    assert load_model(folder, "cpu").dtype == torch.float16


def test_weights_are_converted_to_the_requested_dtype(references, folder):
    model = load_model(folder, "cpu", "bfloat16")
    for name, tensor in references["paligemma1"].named_parameters():
        assert torch.equal(model.get_parameter(canonical_name(name)), tensor.bfloat16())


def test_mixed_dtypes_become_that_of_most_weights(folder):
    def mix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor if tensor.dim() == 1 else tensor.bfloat16() for name, tensor in tensors.items()}

    rewrite(folder, mix)
    assert {parameter.dtype for parameter in load_model(folder, "cpu").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["int8", torch.float64, "double", None, ["float32"]])
def test_unsupported_dtype_is_rejected(folder, dtype):
    with pytest.raises(ValueError, match="dtype must be one of auto, float32, bfloat16, float16, got"):
        load_model(folder, "cpu", dtype)


@pytest.mark.parametrize("device", ["tpu9", "cuda:99", torch.device("cuda:99"), "xpu", "CPU", "", None, 5])
def test_unavailable_device_is_rejected(folder, device):
    with pytest.raises(ValueError, match=rf"device must be auto, cpu, .* got '{device}'|'{device}' is not available"):
        load_model(folder, device)


@pytest.fixture
def set_memory(monkeypatch) -> Callable[[int, int], None]:
    """Set the machine's total and available memory."""
    return lambda total, available: monkeypatch.setattr(
        memory, "available_memory", lambda device: memory.Memory(total, available)
    )


def test_insufficient_memory_is_reported_before_weights_are_read(folder, set_memory, monkeypatch):
    monkeypatch.setattr(load, "_read_tensors", lambda *_: pytest.fail("tensors were read"))
    set_memory(16 * 10**9, 1000)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, "cpu", "bfloat16")
    assert "GB of memory as bfloat16 on cpu, but only 0.00 GB of 16.00 GB is available" in str(caught.value)
    assert "Use dtype float32, whose weights are memory-mapped" in str(caught.value)


def test_memory_mapped_weights_need_no_memory_but_slow_ones_are_logged(folder, set_memory, caplog):
    set_memory(10**12, 0)
    assert load_model(folder, "cpu").dtype == torch.float32
    assert not caplog.records
    set_memory(1000, 0)
    load_model(folder, "cpu")
    assert "read from disk for every token" in caplog.text


def mapped_files() -> list[tuple[int, int, str]]:
    """(start, end, file) of each mapping of this process."""
    rows = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    return [(*(int(number, 16) for number in row[0].split("-")), row[-1]) for row in rows]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc to list memory mappings")
@pytest.mark.parametrize(("dtype", "expected"), [("auto", True), ("bfloat16", False)])
def test_weights_in_the_stored_dtype_are_memory_mapped(sharded, dtype, expected):
    model = load_model(sharded, "cpu", dtype)
    mappings = mapped_files()
    for name, parameter in model.named_parameters():
        address = parameter.data_ptr()
        file = next(file for start, end, file in mappings if start <= address < end)
        assert file.endswith(".safetensors") == expected, name


def test_empty_model_is_on_the_meta_device(folder):
    model = checkpoint.build_empty_model(checkpoint.read_config(folder))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.language_model.model.norm.weight.shape == (64,)


def test_loading_does_not_import_the_compiler(folder):
    code = "import sys; from paligemma.checkpoint import load_model; load_model(sys.argv[1]); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert "paligemma.checkpoint" in run.stdout.split()
    assert not {"sympy", "torch._dynamo", "transformers", "gradio"} & set(run.stdout.split())


def test_progress_counts_the_bytes_of_the_file(folder):
    reports: list[tuple[int, int]] = []
    load_model(folder, "cpu", progress=lambda stage, done, total: reports.append((done, total)))
    total = sum(tensor.nbytes for tensor in load_file(folder / SINGLE_FILE).values())
    assert reports == sorted(reports)
    assert reports[-1] == (total, total)


# Saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_saved_model_loads_here_and_in_transformers(references, folders, case, dtype, tmp_path):
    save_model(load_model(folders[case], "cpu"), tmp_path, dtype)
    with safe_open(tmp_path / SINGLE_FILE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert HEAD not in file.offset_keys()
    loaded, info = transformers.PaliGemmaForConditionalGeneration.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert loaded.dtype == (torch.bfloat16 if dtype else torch.float32)
    assert_equals_reference(load_model(tmp_path, "cpu"), loaded)
    for name, tensor in references[case].named_parameters():
        assert torch.equal(loaded.get_parameter(name), tensor.to(loaded.dtype)), name


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not replace memory-mapped files")
def test_saving_over_the_memory_mapped_file_keeps_the_weights(references, folder):
    model = load_model(folder, "cpu")
    save_model(model, folder)
    assert_equals_reference(model, references["paligemma1"])
    assert_equals_reference(load_model(folder, "cpu"), references["paligemma1"])
    assert not list(folder.glob("*.tmp"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not replace memory-mapped files")
def test_saved_weights_have_the_file_mode_of_the_config(folder):
    save_model(load_model(folder, "cpu"), folder)
    assert (folder / SINGLE_FILE).stat().st_mode == (folder / "config.json").stat().st_mode


@pytest.mark.parametrize("failing", ["save_file", "os.replace"])
def test_failed_save_leaves_the_old_files(folder, failing, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def refuse(*_, **__):
        raise PermissionError(13, "in use by another program")  # as on Windows for a memory-mapped file

    monkeypatch.setattr(f"paligemma.checkpoint.save.{failing}", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*in use.* Check its permissions"):
        save_model(load_model(folder, "cpu"), folder, "bfloat16")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_saving_below_a_file_is_rejected(folder):
    with pytest.raises(CheckpointError, match=r"cannot be written: .* Check its permissions"):
        save_model(load_model(folder, "cpu"), folder / SINGLE_FILE / "below")


# Finding ----------------------------------------------------------------------------------------------------------


def test_local_folder_is_found(folder):
    found = find_checkpoint(folder)
    assert (found.folder, found.source, found.name, found.dtype) == (folder, "folder", str(folder), "auto")


def test_bundled_model_is_found(folder, monkeypatch):
    monkeypatch.setattr(find, "BUNDLED_FOLDER", folder)
    found = find_checkpoint()
    assert (found.folder, found.source) == (folder, "bundled")
    assert find_checkpoint(folder / ".." / folder.name).source == "bundled"


def test_missing_bundled_model_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(find, "BUNDLED_FOLDER", tmp_path / "demo")
    with pytest.raises(CheckpointError, match="Use a folder, or a hub id such as google/"):
        find_checkpoint()


@pytest.mark.parametrize("source", ["./no/such/folder", "nothing", "a/b/c", "~/nothing", "a\\b", "https://x.y/z"])
def test_source_that_is_neither_folder_nor_hub_id_is_rejected(source):
    with pytest.raises(CheckpointError, match="neither a local folder nor a hub id"):
        find_checkpoint(source)


@pytest.mark.parametrize("source", ["a" * 5000, f"a/{'b' * 5000}", "~no_such_user/model", 5, b"folder", ["folder"]])
def test_source_that_is_not_a_path_is_rejected_with_a_short_message(source):
    with pytest.raises(CheckpointError, match="source must be a folder or a hub id, got") as caught:
        find_checkpoint(source)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "message"), [("config.json", "no config.json"), (SINGLE_FILE, "has neither|is missing")]
)
def test_folder_in_place_of_a_file_is_rejected(folder, name, message):
    (folder / name).unlink()
    (folder / name).mkdir()
    for call in (find_checkpoint, load_model):
        with pytest.raises(CheckpointError, match=message):
            call(folder)


def test_file_in_place_of_a_folder_is_rejected(folder):
    with pytest.raises(CheckpointError, match="Use the folder that contains"):
        find_checkpoint(folder / SINGLE_FILE)


def test_revision_requires_a_hub_id(folder, monkeypatch):
    monkeypatch.setattr(find, "BUNDLED_FOLDER", folder)
    for source in (folder, None):
        with pytest.raises(CheckpointError, match="requires a hub id"):
            find_checkpoint(source, revision="main")
