"""Guards on the Hugging Face hub: the folder of a guard, uploaded with the metadata of a model card, and downloaded."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rmd_plugin.files import require
from rmd_plugin.guard.folder import CARD

if TYPE_CHECKING:
    from rmd_plugin.guard.guard import Guard

_TASKS = {"images": "image-classification", "texts": "text-classification", "features": "tabular-classification"}
#: as the card of a folder calls it
_PLACE = "FOLDER_OF_THIS_GUARD"


def push(
    guard: Guard,
    repo_id: str,
    *,
    onnx: bool,
    license: str | None,
    private: bool | None,
    token: str | None,
    create_pr: bool,
    commit_message: str,
) -> str:
    """Upload a guard, see :meth:`rmd_plugin.Guard.push_to_hub`."""
    hub = require("huggingface_hub", "hf", needed_by="push_to_hub")
    api = hub.HfApi(token=token)
    repo_id = str(api.create_repo(repo_id, private=private, exist_ok=True).repo_id)  # with the user's name in front
    metadata = hub.ModelCardData(
        library_name="rmd-plugin",
        pipeline_tag=_TASKS[guard.kind],
        tags=["out-of-distribution-detection", "rmd-plugin", "pytorch"],
        license=license,
    )
    with TemporaryDirectory() as folder:
        path = guard.save(Path(folder) / "guard", onnx=onnx)
        card = (path / CARD).read_text(encoding="utf-8")
        card = card.replace(f'Guard.load("{_PLACE}")', f'Guard.from_pretrained("{repo_id}")')
        (path / CARD).write_text(f"---\n{metadata.to_yaml()}\n---\n\n{card}", encoding="utf-8")
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=path,
            commit_message=commit_message,
            create_pr=create_pr,
            delete_patterns="*",  # a file that an earlier guard had, such as model.onnx, would not belong to this one
        )
    return str(commit.pr_url if create_pr else commit.commit_url)


def download(name: str, **options: Any) -> Path:
    """The folder of a guard: a local one, or a copy of a repository in the cache of the hub."""
    if Path(name).is_dir():
        return Path(name)
    return Path(require("huggingface_hub", "hf", needed_by="from_pretrained").snapshot_download(name, **options))
