"""comfy-tpu install on a ComfyUI that is only its outlines."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from comfy_tpu.cli import install, main
from comfy_tpu.diagnosis import Finding
from comfy_tpu.errors import ComfyTpuError
from comfy_tpu.installation import PACK_NAME, ComfyUI, Pack, pack, start_command, starting
from comfy_tpu.parallel.tpu_holders import TpuHolder

ROOT = Path(__file__).parents[2]
FILES = ("__init__.py", "pyproject.toml", "web", "locales", "example_workflows", "docs")


@pytest.fixture
def comfyui(tmp_path):
    directory = tmp_path / "a ComfyUI"
    for name in ("custom_nodes", "comfy", "models"):
        (directory / name).mkdir(parents=True)
    for name in ("main.py", "nodes.py"):
        (directory / name).touch()
    (directory / "comfyui_version.py").write_text('# generated\n__version__ = "0.7.0"\n')
    (directory / "requirements.txt").write_text("packaging\n")
    return directory


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What the examination finds: nothing, unless a test says otherwise. Starting JAX takes seconds."""
    found = []
    monkeypatch.setattr(install, "examine_comfyui", lambda directory: tuple(found))
    monkeypatch.setattr(install, "examine", lambda: type("Report", (), {"findings": ()}))
    return found


def target(comfyui):
    return comfyui / "custom_nodes" / PACK_NAME


def tree(directory):
    return sorted(path.relative_to(directory) for path in directory.rglob("*") if not path.is_symlink())


def tree_of_files(directory):
    """As tree, with a link counted as the file that it stands for: an archive holds that."""
    return sorted(path.relative_to(directory) for path in directory.rglob("*"))


def refusal(capsys, *arguments):
    assert main.main(["install", *map(str, arguments)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_links_this_checkout_and_writes_nothing_else(comfyui, capsys):
    before = tree(comfyui)
    assert main.main(["install", str(comfyui)]) == 0
    assert target(comfyui).is_symlink()
    assert target(comfyui).resolve() == ROOT
    assert all((target(comfyui) / name).exists() for name in FILES)
    assert tree(comfyui) == before
    assert capsys.readouterr().out.splitlines() == [
        f"✓ ComfyUI  0.7.0 ({comfyui})",
        f"✓ pack     linked: {target(comfyui)} -> {ROOT}",
        "",
        "Ready.",
        f"Start it: cd '{comfyui}' && {sys.executable} main.py --cpu",
    ]


def test_a_second_time_changes_nothing(comfyui, capsys):
    main.main(["install", str(comfyui)])
    stamp = target(comfyui).lstat().st_ctime_ns  # of the link itself: reading it changes the time of access only
    capsys.readouterr()
    assert main.main(["install", str(comfyui)]) == 0
    assert target(comfyui).lstat().st_ctime_ns == stamp
    assert f"pack     linked already: {target(comfyui)}" in capsys.readouterr().out


def test_a_blocking_finding_is_the_exit_status(comfyui, environment, capsys):
    environment.append(Finding("its packages", "blocked", "torchsde is not installed here", "pip install x"))
    assert main.main(["install", str(comfyui)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "✗ its packages  torchsde is not installed here" in lines
    assert "                fix: pip install x" in lines
    assert lines[-1] == "Not ready: 1 to mend first, 0 more to look at."
    assert target(comfyui).is_symlink()


def test_uninstall(comfyui, capsys):
    main.main(["install", str(comfyui)])
    capsys.readouterr()
    for said in (f"removed {target(comfyui)}, a link to {ROOT}", f"not installed: there is no {target(comfyui)}"):
        assert main.main(["install", str(comfyui), "--uninstall"]) == 0
        assert capsys.readouterr().out == said + "\n"
    assert not target(comfyui).is_symlink()
    assert (ROOT / "__init__.py").is_file()


def test_copy_holds_the_pack_and_not_the_repository(comfyui, capsys):
    assert main.main(["install", str(comfyui), "--copy"]) == 0
    assert not target(comfyui).is_symlink()
    assert {path.name for path in target(comfyui).iterdir()} == {*FILES, ".comfy-tpu-copy"}
    for name in ("web", "locales", "example_workflows", "docs"):
        assert tree(target(comfyui) / name) == tree_of_files(ROOT / name)
    # Again, for the newer files; as a link after all; and out.
    assert main.main(["install", str(comfyui), "--copy"]) == 0
    assert "(in the place of a copy of the pack)" in capsys.readouterr().out
    assert main.main(["install", str(comfyui)]) == 0
    assert target(comfyui).is_symlink()
    assert main.main(["install", str(comfyui), "--copy"]) == 0
    assert main.main(["install", str(comfyui), "--uninstall"]) == 0
    assert list((comfyui / "custom_nodes").iterdir()) == []


NOT_OURS = {
    "a foreign directory": (lambda path, tmp: path.mkdir(), "is something else than this pack; it stays"),
    "a file": (lambda path, tmp: path.write_text("mine"), "is something else than this pack; it stays"),
    "a link to something else": (lambda path, tmp: path.symlink_to(tmp), "which is not this pack; it stays"),
    "another checkout": (
        lambda path, tmp: (path.mkdir(), shutil.copy(ROOT / "__init__.py", path)),
        "is a checkout of its own; it stays: move it away first",
    ),
}


@pytest.mark.parametrize("flags", [[], ["--copy"], ["--uninstall"]], ids=["link", "copy", "uninstall"])
@pytest.mark.parametrize("case", NOT_OURS)
def test_what_is_not_ours_stays(case, flags, comfyui, tmp_path, capsys):
    make, said = NOT_OURS[case]
    make(target(comfyui), tmp_path)
    before, kind = tree(comfyui), target(comfyui).is_symlink()
    assert said in refusal(capsys, comfyui, *flags)
    assert (tree(comfyui), target(comfyui).is_symlink()) == (before, kind)


def test_a_link_to_another_checkout_or_to_one_that_is_gone_is_replaced(comfyui, tmp_path, capsys):
    older = tmp_path / "older"
    older.mkdir()
    shutil.copy(ROOT / "__init__.py", older)
    target(comfyui).symlink_to(older)
    assert main.main(["install", str(comfyui)]) == 0
    assert f"(in the place of a link to {older})" in capsys.readouterr().out
    target(comfyui).unlink()
    target(comfyui).symlink_to(tmp_path / "gone")
    assert main.main(["install", str(comfyui)]) == 0
    assert f"(in the place of a link to {tmp_path / 'gone'}, which is gone)" in capsys.readouterr().out
    assert target(comfyui).resolve() == ROOT


def test_a_checkout_that_is_in_custom_nodes_already_is_not_linked_a_second_time(comfyui, capsys):
    (comfyui / "custom_nodes" / "comfy-tpu").symlink_to(ROOT)
    assert main.main(["install", str(comfyui)]) == 0
    assert f"in its place already: {comfyui / 'custom_nodes' / 'comfy-tpu'}" in capsys.readouterr().out
    assert not target(comfyui).is_symlink()


def test_custom_nodes_is_made_where_it_is_missing(comfyui):
    (comfyui / "custom_nodes").rmdir()
    assert main.main(["install", str(comfyui)]) == 0
    assert target(comfyui).resolve() == ROOT


WRONG = {
    "no directory": (lambda path: path / "x", "x does not exist; give the directory that holds ComfyUI's main.py"),
    "a file": (lambda path: path / "main.py", "main.py is a file; give the directory"),
    "another directory": (lambda path: path / "models", "is not ComfyUI: no main.py, nodes.py, comfy in it; give"),
    "the directory above": (lambda path: path.rename(path.with_name("ComfyUI")).parent, "ComfyUI\n"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_comfyui_is_refused(case, comfyui, capsys):
    find, said = WRONG[case]
    directory = find(comfyui)
    error = refusal(capsys, directory)
    assert error.startswith(f"comfy-tpu: COMFYUI_DIR {directory}")
    assert said in error


@pytest.mark.parametrize(
    ("content", "version"),
    [
        ('__version__ = "0.6.9"', "0.6.9"),
        (None, "of an unknown version"),
        ("__version__ = 'nonsense'", "of an unknown version"),
    ],
)
def test_an_old_comfyui_is_refused_but_can_be_cleaned(content, version, comfyui, capsys):
    main.main(["install", str(comfyui)])
    capsys.readouterr()
    file = comfyui / "comfyui_version.py"
    file.unlink() if content is None else file.write_text(content)
    refused = f"comfy-tpu: COMFYUI_DIR {comfyui} holds ComfyUI {version}; needs >=0.7.0: "
    taken = "it is no git clone, so take a newer one: https://github.com/comfyanonymous/ComfyUI/releases\n"
    assert refusal(capsys, comfyui) == refused + taken
    (comfyui / ".git").mkdir()
    updated = f"update it: git -C '{comfyui}' checkout master && git -C '{comfyui}' pull\n"
    assert refusal(capsys, comfyui) == refused + updated
    assert main.main(["install", str(comfyui), "--uninstall"]) == 0
    assert not target(comfyui).is_symlink()


def test_newer_versions_are_welcome(comfyui):
    (comfyui / "comfyui_version.py").write_text('__version__ = "0.33.1"\n')
    assert main.main(["install", str(comfyui)]) == 0


def test_a_place_that_cannot_be_written_is_explained(comfyui, monkeypatch, capsys):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    error = refusal(capsys, comfyui)
    assert error.endswith(
        "could not be written: Operation not permitted; where links are not possible use --copy, and a user who may "
        "write there\n"
    )
    assert list((comfyui / "custom_nodes").iterdir()) == []


def test_a_copy_that_fails_leaves_what_was_there(comfyui, monkeypatch, capsys):
    main.main(["install", str(comfyui), "--copy"])
    before = tree(comfyui)
    capsys.readouterr()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    assert "No space left on device" in refusal(capsys, comfyui, "--copy")
    assert tree(comfyui) == before


def test_a_package_without_its_pack_says_how_to_restore_it(comfyui, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pack.comfy_tpu, "__file__", str(tmp_path / "comfy_tpu" / "__init__.py"))
    assert refusal(capsys, comfyui).endswith(
        f"are neither around {tmp_path / 'comfy_tpu'} nor inside it; restore them: git -C {ROOT} checkout -- "
        "__init__.py pyproject.toml web locales example_workflows docs\n"
    )


def test_this_is_the_pack():
    assert Pack.here().directory == ROOT


MAIN = "import os, sys\nprint(os.getcwd(), sys.argv[1:])\nsys.exit(7)\n"


def start(comfyui, *options):
    command = [sys.executable, "-m", "comfy_tpu.cli", "comfyui", "start", str(comfyui), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_start_is_comfyui_itself_in_its_directory_with_its_exit_status(comfyui):
    (comfyui / "main.py").write_text(MAIN)
    target(comfyui).symlink_to(ROOT)
    done = start(comfyui, "--port", "8200")
    cpu = [] if Path("/proc/driver/nvidia/version").exists() else ["--cpu"]
    assert done.stdout == f"{comfyui} {[*cpu, '--port', '8200']}\n"
    assert done.returncode == 7
    assert shlex.join(["main.py", *cpu, "--port", "8200"]) in done.stderr


def test_start_without_the_pack_says_how_to_install_it(comfyui):
    (comfyui / "main.py").write_text(MAIN)
    done = start(comfyui)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"install them first: comfy-tpu install {shlex.quote(str(comfyui))}" in done.stderr


@pytest.mark.parametrize("options", [["--cpu"], ["--cuda-device", "1"], ["--default-device=0"]])
def test_start_leaves_the_choice_of_a_device_to_the_user(comfyui, options, tmp_path):
    target(comfyui).symlink_to(ROOT)
    command = start_command(ComfyUI.open(comfyui), options, tmp_path)
    assert command == [sys.executable, "main.py", *options]


def test_start_uses_the_card_of_a_machine_with_nvidias_driver(comfyui, tmp_path):
    target(comfyui).symlink_to(ROOT)
    driver = tmp_path / "proc" / "driver" / "nvidia" / "version"
    assert start_command(ComfyUI.open(comfyui), [], tmp_path)[2:] == ["--cpu"]
    driver.parent.mkdir(parents=True)
    driver.touch()
    assert start_command(ComfyUI.open(comfyui), [], tmp_path)[2:] == []


def test_start_names_the_process_that_holds_the_tpu(comfyui, tmp_path, monkeypatch):
    target(comfyui).symlink_to(ROOT)
    monkeypatch.setattr(starting, "find_tpu", lambda root: "/dev/accel0")
    holder = TpuHolder(4711, "python main.py --cpu", "anna")
    monkeypatch.setattr(starting, "find_holders", lambda root: (holder,))
    with pytest.raises(ComfyTpuError, match=r"the TPU is held by process 4711 .*; end that first \(kill 4711\)"):
        start_command(ComfyUI.open(comfyui), [], tmp_path)


def test_start_refuses_an_old_comfyui_and_a_disabled_pack(comfyui, tmp_path):
    (comfyui / "custom_nodes" / f"{PACK_NAME}.disabled").symlink_to(ROOT)
    with pytest.raises(ComfyTpuError, match="the nodes are not in"):
        start_command(ComfyUI.open(comfyui), [], tmp_path)
    (comfyui / "comfyui_version.py").write_text('__version__ = "0.3.0"')
    with pytest.raises(ComfyTpuError, match="holds ComfyUI 0.3.0; needs"):
        start_command(ComfyUI.open(comfyui), [], tmp_path)
