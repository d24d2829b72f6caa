"""Files and folders are replaced whole or not at all, and no draft stays."""

from pathlib import Path

import pytest

from sparrow_sglang.atomic_write import DRAFT_PREFIX, delete_drafts, replacing, write_json


def fill(target: Path, content: str, as_folder: bool) -> None:
    with replacing(target) as draft:
        if as_folder:
            draft.mkdir()
            draft = draft / "part"
        draft.write_text(content)
        if content == "fails":
            raise OSError("no space left")


@pytest.mark.parametrize("as_folder", [False, True])
def test_what_fails_leaves_the_old_content_and_no_draft(tmp_path: Path, as_folder: bool) -> None:
    target = tmp_path / "new" / "result"
    fill(target, "first", as_folder)
    fill(target, "second", as_folder)
    with pytest.raises(OSError, match="no space"):
        fill(target, "fails", as_folder)
    content = target / "part" if as_folder else target
    assert content.read_text() == "second"
    assert list(target.parent.iterdir()) == [target]


def test_drafts_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    write_json(tmp_path / "kept.json", [1])
    (tmp_path / f"{DRAFT_PREFIX}killed" / "part").mkdir(parents=True)
    delete_drafts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
