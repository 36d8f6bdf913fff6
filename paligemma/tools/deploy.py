"""Put the project on Hugging Face as a Space.

    python -m paligemma.tools.deploy NAME/SPACE [--hardware zero-a10g] [--model HUB_ID] [--private] [--dry-run]

Log in first: `hf auth login`, or the environment variable HF_TOKEN. The Space is made if there is none, and gets one
commit with what the app needs; other files that it has stay. Large files go where the hub wants them. Two files differ
from those here: requirements.txt, for the PyTorch that the hardware needs, and README.md, whose head says where the
Space's picture is. The token goes to the hub's own servers only: a Space that shall read gated weights needs one as a
secret named HF_TOKEN, which its settings take.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, SpaceHardware
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("app.py", "LICENSE", "README*.md", "requirements.txt", "pyproject.toml", "paligemma/**/*", "assets/**/*")
ZERO_GPU = SpaceHardware.ZERO_A10G.value
CPU = (SpaceHardware.CPU_BASIC.value, SpaceHardware.CPU_UPGRADE.value)
ZERO_GPU_TORCH = "torch>=2.8,<2.12"  # what ZeroGPU runs
CPU_WHEELS = "--extra-index-url https://download.pytorch.org/whl/cpu"  # a tenth of the size, without CUDA


def files_to_upload(root: Path = ROOT) -> Iterator[str]:
    """The paths, from the project's folder on, of what a Space needs: all but tests and what is made while running."""
    for pattern in PATTERNS:
        for path in sorted(root.glob(pattern)):
            name = path.relative_to(root)
            if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in name.parts):
                yield name.as_posix()


def requirements_for(text: str, hardware: str) -> str:
    """requirements.txt for this hardware; ValueError where it asks for no torch."""
    if not re.search(r"^torch>=", text, re.M):
        raise ValueError("requirements.txt has no line that begins with torch>=")
    if hardware == ZERO_GPU:
        return re.sub(r"^torch>=.*$", ZERO_GPU_TORCH, text, flags=re.M)
    return f"{CPU_WHEELS}\n{text}" if hardware in CPU else text


def readme_for(text: str, space: str, hardware: str) -> str:
    """README.md, with the address of its picture, which the hub wants whole, and the hardware for whoever copies it."""
    image = rf"thumbnail: https://huggingface.co/spaces/{space}/resolve/main/\1\nsuggested_hardware: {hardware}"
    return re.sub(r"^thumbnail: (\S+)$", image, text, count=1, flags=re.M)


def changed_files(space: str, hardware: str, root: Path = ROOT) -> dict[str, str]:
    """The texts of the files that differ on the Space."""
    requirements, readme = ((root / name).read_text(encoding="utf-8") for name in ("requirements.txt", "README.md"))
    return {
        "requirements.txt": requirements_for(requirements, hardware),
        "README.md": readme_for(readme, space, hardware),
    }


def print_plan(changed: dict[str, str]) -> None:
    """What would be uploaded: every file with its size, and how the changed ones differ."""
    for name in files_to_upload():
        size = len(changed[name].encode()) if name in changed else (ROOT / name).stat().st_size
        print(f"{size:>12,}  {name}{'  (changed)' if name in changed else ''}")
    for name, text in changed.items():
        before = (ROOT / name).read_text(encoding="utf-8").splitlines()
        print(
            *difflib.unified_diff(before, text.splitlines(), name, f"{name} of the Space", lineterm="", n=0), sep="\n"
        )


def upload(api: HfApi, space: str, hardware: str, model: str | None, private: bool) -> str:
    """Make the Space if there is none, and commit the files; returns its address."""
    changed = changed_files(space, hardware)
    url = api.create_repo(
        space, repo_type="space", space_sdk="gradio", space_hardware=hardware, private=private, exist_ok=True
    )
    if model:
        api.add_space_variable(space, "MODEL_ID", model)
    operations = [
        CommitOperationAdd(name, changed[name].encode() if name in changed else ROOT / name)
        for name in files_to_upload()
    ]
    api.create_commit(space, operations, commit_message="Upload the app", repo_type="space")
    return str(url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("space", help="its name on the hub, such as someone/paligemma")
    parser.add_argument(
        "--hardware", default=ZERO_GPU, choices=[hardware.value for hardware in SpaceHardware], metavar="NAME",
        help="the hub's name of it, such as cpu-basic or t4-small (default: %(default)s, which is ZeroGPU)",
    )  # fmt: skip
    parser.add_argument("--model", help="the hub id of the model that answers there (default: the bundled one)")
    parser.add_argument("--private", action="store_true", help="only you see it")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be uploaded; nothing is sent")
    arguments = parser.parse_args()
    if arguments.dry_run:
        return print_plan(changed_files(arguments.space, arguments.hardware))
    try:
        url = upload(HfApi(), arguments.space, arguments.hardware, arguments.model, arguments.private)
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError) as error:
        sys.exit(f"The hub refused: {error}\nLog in with `hf auth login`, and name a Space of your own: NAME/SPACE.")
    print(f"The Space is at {url}. It builds now, which takes some minutes.")


if __name__ == "__main__":
    main()
