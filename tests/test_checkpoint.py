"""Finding, checking, loading and saving checkpoints; each failure with its message."""

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
    EMBEDDING,
    HEAD,
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    find,
    load_model,
    memory,
    save,
)
from paligemma.modeling import PaliGemmaForConditionalGeneration

CASES = ("paligemma1", "paligemma2")
POSITIONS = "vision_tower.vision_model.embeddings.position_embedding.weight"


@pytest.fixture(scope="module")
def references() -> dict[str, transformers.PaliGemmaForConditionalGeneration]:
    return {case: make_model(case) for case in CASES}


@pytest.fixture(scope="module")
def folders(references, tmp_path_factory) -> dict[str, Path]:
    """A folder of each case in the hub's layout, not to be changed."""
    root = tmp_path_factory.mktemp("hub")
    return {case: save_layout(model, root / case) for case, model in references.items()}


@pytest.fixture
def folder(folders, tmp_path) -> Path:
    """A PaliGemma 1 in the hub's layout, to be spoilt."""
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
    theirs = {checkpoint.our_name(name): tensor for name, tensor in reference.named_parameters()}
    ours = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, theirs[name]), name


# Layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_every_layout_loads_to_the_same_tensors(references, case, layout, sharded, tmp_path):
    folder = save_layout(references[case], tmp_path / "model", layout, sharded=sharded)
    assert (folder / INDEX_FILE).exists() == sharded
    assert_equals_reference(load_model(folder, "cpu"), references[case])


@pytest.mark.parametrize("case", CASES)
def test_the_hubs_sparse_configuration_loads(references, case, tmp_path):
    folder = save_layout(references[case], tmp_path / "model", sparse=True)
    assert "head_dim" not in json.loads((folder / "config.json").read_text())["text_config"]
    assert_equals_reference(load_model(folder, "cpu"), references[case])


def test_a_loaded_model_is_ready_to_answer(folder):
    model = load_model(folder, "cpu")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.language_model.lm_head.weight is model.language_model.get_input_embeddings().weight


def test_a_model_to_train_requires_gradients_and_leaves_the_file_alone(folder):
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


# The tied head ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [HEAD, "lm_head.weight"])
def test_a_head_that_repeats_the_embedding_is_dropped(references, folder, name):
    rewrite(folder, lambda tensors: {**tensors, name: tensors[EMBEDDING].clone()})
    assert_equals_reference(load_model(folder, "cpu"), references["paligemma1"])


def test_a_head_in_a_wider_type_is_compared_in_the_narrower(folder):
    def halve(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        return {**narrow, HEAD: tensors[EMBEDDING]}

    rewrite(folder, halve)
    assert load_model(folder, "cpu").dtype == torch.bfloat16


def test_a_head_without_embedding_becomes_the_embedding(references, folder):
    rewrite(folder, lambda tensors: {HEAD if name == EMBEDDING else name: t for name, t in tensors.items()})
    assert_equals_reference(load_model(folder, "cpu"), references["paligemma1"])


def test_a_head_that_differs_in_its_last_number_is_refused(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "COMPARED_ROWS", 100)

    def add_head(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][-1, -1] += 1

    rewrite(folder, add_head)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight in .* differs from .*embed_tokens\.weight"):
        load_model(folder, "cpu")


# What does not fit ------------------------------------------------------------------------------------------------


def test_missing_and_unexpected_tensors_are_named_together(folder):
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["multi_modal_projector.linear.bias"]
        for index in range(11):
            tensors[f"extra.{index:02}"] = torch.zeros(1)

    rewrite(folder, spoil)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, "cpu")
    message = str(caught.value)
    assert "missing (1): multi_modal_projector.linear.bias" in message
    assert "unexpected (11): extra.00" in message
    assert "extra.07, and 3 more" in message and "extra.08" not in message


def test_paligemma_2_weights_do_not_pass_for_paligemma_1(folders, folder):
    shutil.copy(folders["paligemma2"] / SINGLE_FILE, folder)
    with pytest.raises(CheckpointError, match=r"unexpected .*pre_feedforward_layernorm"):
        load_model(folder, "cpu")


def test_weights_of_another_resolution_are_refused(folder):
    edit_config(folder, vision_config={"image_size": 112})
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, "cpu")
    assert f"{POSITIONS} is (16, 48), the configuration needs (64, 48)" in str(caught.value)


def test_another_number_of_embedding_rows_is_refused(folder):
    rows = load_model(folder, "cpu").config.text_config.vocab_size
    edit_config(folder, text_config={"vocab_size": rows - 64})
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, "cpu")
    assert f"{EMBEDDING} is ({rows}, 64), the configuration needs ({rows - 64}, 64)" in str(caught.value)


def test_quantised_weights_are_refused(folder):
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: {**tensors, name: tensors[name].to(torch.int8)})
    with pytest.raises(CheckpointError, match=r"wrong type .*up_proj\.weight is I8, not one of F32, BF16, F16"):
        load_model(folder, "cpu")


def test_a_tensor_given_twice_is_refused(folder):
    name = "multi_modal_projector.linear.bias"
    rewrite(folder, lambda tensors: {**tensors, f"model.{name}": tensors[name].clone()})
    with pytest.raises(CheckpointError, match="one tensor, given twice"):
        load_model(folder, "cpu")


def test_a_misfit_is_found_before_any_tensor_is_read(folder, monkeypatch):
    rewrite(folder, lambda tensors: {**tensors, "extra": torch.zeros(1)})
    monkeypatch.setattr(checkpoint, "_read_tensors", lambda *_: pytest.fail("tensors were read"))
    with pytest.raises(CheckpointError, match="unexpected"):
        load_model(folder, "cpu")


def test_a_tensor_that_only_the_index_names_is_missing(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    tensors = load_file(shard)
    name, _ = tensors.popitem()
    save_file(tensors, shard)
    with pytest.raises(CheckpointError, match=rf"missing \(1\): .*{checkpoint.our_name(name).split('.')[-2]}"):
        load_model(sharded, "cpu")


# Broken files -----------------------------------------------------------------------------------------------------


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    for use in (lambda: load_model(sharded, "cpu"), lambda: find(sharded)):
        with pytest.raises(CheckpointError, match=f"{shard.name} is missing in .*download it again"):
            use()


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_a_truncated_shard_is_named(sharded, size):
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:size])
    with pytest.raises(CheckpointError, match=f"{shard.name} is cut short or damaged .*delete .*{shard.name} and copy"):
        load_model(sharded, "cpu")


@pytest.mark.parametrize("length", [2**64 - 1, 10**12, 2, 0])
def test_a_damaged_header_is_named(folder, length):
    content = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(length.to_bytes(8, "little") + content[8:])
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        load_model(folder, "cpu")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "no readable weight_map"),
        ("{}", "no readable weight_map"),
        ("[]", "no readable weight_map"),
        *(
            (json.dumps({"weight_map": weight_map}), r"must name \.safetensors files that lie beside it")
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
def test_a_bad_index_is_named(sharded, content, message):
    (sharded / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_model(sharded, "cpu")


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    for use in (lambda: load_model(folder, "cpu"), lambda: find(folder)):
        with pytest.raises(CheckpointError, match=r"has no config\.json; a checkpoint holds"):
            use()


def test_another_kind_of_model_is_refused(folder):
    (folder / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(CheckpointError, match="'llava'"):
        load_model(folder, "cpu")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused_unopened(folder, name):
    (folder / SINGLE_FILE).rename(folder / name)
    with pytest.raises(CheckpointError, match=f"only as {name}, a pickle"):
        find(folder)


@pytest.mark.parametrize(
    ("name", "message"), [("model.Q4_K.gguf", "GGUF"), ("pt_224.npz", "big_vision"), ("adapter_config.json", "PEFT")]
)
def test_weights_of_other_software_are_named(folder, name, message):
    (folder / SINGLE_FILE).rename(folder / name)
    for call in (find, load_model):
        with pytest.raises(CheckpointError, match=message):
            call(folder)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq"])
def test_a_quantised_checkpoint_is_refused_by_its_method(folder, method):
    data = {**json.loads((folder / "config.json").read_text()), "quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=rf"cannot be used: .*quantized \({method}\); take the model"):
        load_model(folder, "cpu")


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 10**9}, {"hidden_size": 10**6, "intermediate_size": 10**6}, {"hidden_size": -1}]
)
def test_absurd_sizes_are_refused_before_a_model_is_made(folder, changes, monkeypatch):
    monkeypatch.setattr(checkpoint, "build_empty_model", lambda *_: pytest.fail("a model was made"))
    edit_config(folder, text_config=changes)
    with pytest.raises(CheckpointError, match=r"cannot be used: .*(allowed|must be)"):
        load_model(folder, "cpu")


def test_a_folder_that_cannot_be_read_is_said_so(folder, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read .*Permission denied.*; let this user read it"):
        find(folder)


def test_a_folder_without_weights_is_refused(folder):
    (folder / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        find(folder)


@pytest.mark.parametrize(("other", "message"), [("tokenizer.model", "only tokenizer.model"), (None, "no tokenizer")])
def test_a_folder_without_tokenizer_json_is_refused(folder, other, message):
    (folder / "tokenizer.json").unlink()
    if other:
        (folder / other).write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        find(folder)


# Types, memory, progress ------------------------------------------------------------------------------------------


def test_the_stored_type_is_kept(folder):
    rewrite(folder, lambda tensors: {name: tensor.half() for name, tensor in tensors.items()})
    assert load_model(folder, "cpu").dtype == torch.float16


def test_a_wanted_type_is_converted_to(references, folder):
    model = load_model(folder, "cpu", "bfloat16")
    for name, tensor in references["paligemma1"].named_parameters():
        assert torch.equal(model.get_parameter(checkpoint.our_name(name)), tensor.bfloat16())


def test_mixed_types_become_the_one_of_most_weights(folder):
    def mix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor if tensor.dim() == 1 else tensor.bfloat16() for name, tensor in tensors.items()}

    rewrite(folder, mix)
    assert {parameter.dtype for parameter in load_model(folder, "cpu").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["int8", torch.float64, "double", None, ["float32"]])
def test_other_types_are_refused(folder, dtype):
    with pytest.raises(ValueError, match="allowed: auto, float32, bfloat16, float16"):
        load_model(folder, "cpu", dtype)


@pytest.mark.parametrize("device", ["tpu9", "cuda:99", torch.device("cuda:99"), "xpu", "CPU", "", None, 5])
def test_a_device_that_is_not_there_is_refused(folder, device):
    with pytest.raises(ValueError, match=f"device .*{device}.* is (unknown|not available)"):
        load_model(folder, device)


@pytest.fixture
def machine(monkeypatch) -> Callable[[int, int], None]:
    """Sets how much memory there seems to be, in all and free."""
    return lambda total, free: monkeypatch.setattr(
        memory, "available_memory", lambda device: memory.Memory(total, free)
    )


def test_too_little_memory_for_converted_weights_is_refused_with_numbers_before_they_are_read(
    folder, machine, monkeypatch
):
    monkeypatch.setattr(checkpoint, "_read_tensors", lambda *_: pytest.fail("tensors were read"))
    machine(16 * 10**9, 1000)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, "cpu", "bfloat16")
    assert "GB of memory as bfloat16 on cpu, and 0.00 GB of 16.00 GB are free" in str(caught.value)
    assert "ask for the type that it is stored in, float32, which stays in the file" in str(caught.value)


def test_weights_that_stay_in_their_file_need_no_memory_but_are_said_to_be_slow_where_it_is_too_small(
    folder, machine, caplog
):
    machine(10**12, 0)
    assert load_model(folder, "cpu").dtype == torch.float32
    assert not caplog.records
    machine(1000, 0)
    load_model(folder, "cpu")
    assert "more than the memory of this machine" in caplog.text


def test_where_the_system_says_nothing_of_its_memory_nothing_is_refused(folder, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: None)
    assert load_model(folder, "cpu", "bfloat16").dtype == torch.bfloat16


def mapped_files() -> list[tuple[int, int, str]]:
    """(start, end, file) of each mapping of this process."""
    rows = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    return [(*(int(number, 16) for number in row[0].split("-")), row[-1]) for row in rows]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc to see what memory is a file's")
@pytest.mark.parametrize(("dtype", "expected"), [("auto", True), ("bfloat16", False)])
def test_weights_in_the_stored_type_stay_in_the_file(sharded, dtype, expected):
    model = load_model(sharded, "cpu", dtype)
    mappings = mapped_files()
    for name, parameter in model.named_parameters():
        address = parameter.data_ptr()
        file = next(file for start, end, file in mappings if start <= address < end)
        assert file.endswith(".safetensors") == expected, name


def test_an_empty_model_has_every_weight_and_no_memory(folder):
    model = checkpoint.build_empty_model(checkpoint.read_config(folder))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.language_model.model.norm.weight.shape == (64,)


def test_loading_does_not_import_pytorchs_compiler(folder):
    code = "import sys; from paligemma.checkpoint import load_model; load_model(sys.argv[1]); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert "paligemma.checkpoint" in run.stdout.split()
    assert not {"sympy", "torch._dynamo", "transformers", "gradio"} & set(run.stdout.split())


def test_progress_counts_the_bytes_of_the_file(folder):
    seen: list[tuple[int, int]] = []
    load_model(folder, "cpu", progress=lambda stage, done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in load_file(folder / SINGLE_FILE).values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


# Saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_saved_loads_here_and_in_transformers(references, folders, case, dtype, tmp_path):
    save(load_model(folders[case], "cpu"), tmp_path, dtype)
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


def test_saving_over_the_file_that_is_in_use_keeps_the_weights(references, folder):
    model = load_model(folder, "cpu")
    save(model, folder)
    assert_equals_reference(model, references["paligemma1"])
    assert_equals_reference(load_model(folder, "cpu"), references["paligemma1"])
    assert not list(folder.glob("*.unfinished"))


def test_saved_weights_are_as_readable_as_the_configuration(folder):
    save(load_model(folder, "cpu"), folder)
    assert (folder / SINGLE_FILE).stat().st_mode == (folder / "config.json").stat().st_mode


@pytest.mark.parametrize("failing", ["save_file", "os.replace"])
def test_a_save_that_fails_leaves_what_was_there(references, folder, failing, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def refuse(*_, **__):
        raise PermissionError(13, "in use by another program")  # as on Windows, over a mapped file

    monkeypatch.setattr(f"paligemma.checkpoint.{failing}", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be written .*in use.* take a folder"):
        save(load_model(folder, "cpu"), folder, "bfloat16")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_said_so(folder):
    with pytest.raises(CheckpointError, match=r"cannot be written .* take a folder that this user may write to"):
        save(load_model(folder, "cpu"), folder / SINGLE_FILE / "below")


# Finding ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_found_and_keeps_its_type(folder):
    found = find(folder)
    assert (found.folder, found.origin, found.name, found.dtype) == (folder, "folder", str(folder), "auto")


def test_the_bundled_demo_is_found(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "BUNDLED_FOLDER", folder)
    found = find()
    assert (found.folder, found.origin) == (folder, "bundled")
    assert find(folder / ".." / folder.name).origin == "bundled"


def test_without_a_bundled_demo_the_message_says_how_to_name_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "BUNDLED_FOLDER", tmp_path / "demo")
    with pytest.raises(CheckpointError, match="name a folder, or a hub id such as google/"):
        find()


@pytest.mark.parametrize("source", ["./no/such/folder", "nothing", "a/b/c", "~/nothing", "a\\b", "https://x.y/z"])
def test_what_is_no_folder_and_no_hub_id_is_refused(source):
    with pytest.raises(CheckpointError, match="neither a folder on this machine nor a hub id"):
        find(source)


@pytest.mark.parametrize("source", ["a" * 5000, f"a/{'b' * 5000}", "~no_such_user/model", 5, b"folder", ["folder"]])
def test_what_can_be_no_path_is_refused_in_few_words(source):
    with pytest.raises(CheckpointError, match="is no folder and no hub id") as caught:
        find(source)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "message"), [("config.json", "no config.json"), (SINGLE_FILE, "has neither|is missing")]
)
def test_a_folder_is_no_file(folder, name, message):
    (folder / name).unlink()
    (folder / name).mkdir()
    for call in (find, load_model):
        with pytest.raises(CheckpointError, match=message):
            call(folder)


def test_a_file_is_no_folder(folder):
    with pytest.raises(CheckpointError, match="give the folder that holds"):
        find(folder / SINGLE_FILE)


def test_a_revision_needs_a_hub_id(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "BUNDLED_FOLDER", folder)
    for source in (folder, None):
        with pytest.raises(CheckpointError, match="belongs to a hub id"):
            find(source, revision="main")
