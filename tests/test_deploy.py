"""deploy/: manifests that agree with themselves, with the TPU slices of `plan`, and with the commands that they run.

Nothing here asks a cluster. deploy/README.md says what else was checked by hand.
"""

import argparse
import math
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from comfy_tpu.cli.main import _parser
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import rank_layouts
from comfy_tpu.planning.models import find_model
from comfy_tpu.planning.plan import parse_size

yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers, and is no dependency of our own")

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
FILES = sorted(DEPLOY.rglob("*.yaml"))
SLICES = ("v6e-8", "v6e-16", "v5p-8")
ACCELERATORS = {"tpu-v6e-slice": "v6e", "tpu-v5p-slice": "v5p"}
"""GKE's names of the generations."""
KINDS = {
    "RayCluster": "ray.io/v1",
    "RayJob": "ray.io/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "ServiceAccount": "v1",
    "PersistentVolumeClaim": "v1",
}


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_costs_are_those_of_plan(page):
    """A thousand videos of 50 steps: seconds a step, seconds a video, hours of a slice, and chip-hours."""
    model = find_model("Wan-AI/Wan2.1-T2V-14B-Diffusers")
    rows = re.findall(r"^\| (v\w+-\d+) \| (\d+P) \| (\S+) \|(.*)\|$", (DEPLOY / page).read_text("utf-8"), re.MULTILINE)
    assert {tpu for tpu, *_ in rows} == set(SLICES)
    for tpu, size, mesh, cells in rows:
        best = rank_layouts(model.workload(parse_size(size, model)), parse_slice(tpu))[0]
        assert mesh == str(best.sizes).replace(",tp=1", "")
        step = best.step_seconds
        hours = 1000 * 50 * step / 3600
        expected = (step, 50 * step, hours, hours * parse_slice(tpu).chips)
        assert [float(cell) for cell in cells.split("|")] == pytest.approx(expected, rel=0.02)


def load(path):
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def manifest(name):
    (found,) = load(DEPLOY / name)
    return found


def find(value, key):
    """All values of a key, at any depth."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name == key:
                yield each
            yield from find(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from find(each, key)


def tpu_groups():
    """Slices of the manifests: file, hosts of a slice, pod spec."""
    for path in FILES:
        for document in load(path):
            for groups in find(document, "workerGroupSpecs"):
                for group in groups:
                    yield path.name, group["numOfHosts"], group["template"]["spec"]
            for jobs in find(document, "replicatedJobs"):
                for job in jobs:
                    spec = job["template"]["spec"]
                    assert spec["parallelism"] == spec["completions"]
                    assert spec["completionMode"] == "Indexed", "GKE numbers pods by their index"
                    yield path.name, spec["parallelism"], spec["template"]["spec"]


TPU_GROUPS = list(tpu_groups())


def commands():
    """What pods and machines run: file, words after comfy-tpu."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        found = [shlex.split(line) for document in load(path) for line in find(document, "entrypoint")]
        found += [words for document in load(path) for words in find(document, "command")]
        if path.parent.name == "skypilot":
            found += [shlex.split(line) for line in load(path)[0]["run"].splitlines()]
        # In comments, over several lines.
        joined = re.sub(r"\\\n#\s*", "", text)
        found += [shlex.split(line) for line in re.findall(r"^#\s+.*?-- (comfy-tpu .*)$", joined, re.MULTILINE)]
        for words in found:
            assert Path(words[0]).name == "comfy-tpu", words
            yield path.name, words[1:]


COMMANDS = list(commands())


def test_every_file_is_looked_at():
    assert {path.name for path in FILES} == {
        *(f"{kind}-{name}.yaml" for kind in ("raycluster", "rayjob") for name in SLICES),
        *("state.yaml", "generate-v6e-16.yaml", "batch.yaml"),
    }
    assert len(TPU_GROUPS) == 2 * len(SLICES) + 1
    assert len(COMMANDS) == 2 * len(SLICES) + 2


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kinds_have_what_they_need(path):
    for document in load(path):
        if path.parent.name == "skypilot":
            assert set(document) <= {"name", "resources", "workdir", "envs", "setup", "run"}
            continue
        assert document["apiVersion"] == KINDS[document["kind"]]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?", document["metadata"]["name"])
        if document["kind"] == "RayJob":
            assert document["spec"]["entrypoint"]
            assert document["spec"]["shutdownAfterJobFinishes"], "TPUs that nobody uses cost the same"


@pytest.mark.parametrize(("file", "hosts", "pod"), TPU_GROUPS, ids=[group[0] for group in TPU_GROUPS])
def test_topology_hosts_and_chips_agree(file, hosts, pod):
    selector = pod["nodeSelector"]
    generation = ACCELERATORS[selector["cloud.google.com/gke-tpu-accelerator"]]
    topology = selector["cloud.google.com/gke-tpu-topology"]
    (container,) = pod["containers"]
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    chips = hosts * int(resources["limits"]["google.com/tpu"])
    assert chips == math.prod(map(int, topology.split("x")))
    slice_ = parse_slice(re.search(r"v\d\w-\d+", file).group())
    assert (slice_.chip.name, slice_.chips, slice_.topology) == (generation, chips, topology)


@pytest.mark.parametrize(("file", "hosts", "pod"), TPU_GROUPS, ids=[group[0] for group in TPU_GROUPS])
def test_volumes_are_those_that_are_mounted(file, hosts, pod):
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("name", SLICES)
def test_a_kept_cluster_is_that_of_a_job(name):
    job = manifest(f"kuberay/rayjob-{name}.yaml")
    cluster = manifest(f"kuberay/raycluster-{name}.yaml")
    assert cluster["spec"] == job["spec"]["rayClusterSpec"]


@pytest.mark.parametrize("name", SLICES)
def test_no_worker_starts_on_the_head(name):
    """Where a cluster has no TPUs yet, a driver would take CPUs."""
    assert manifest(f"kuberay/raycluster-{name}.yaml")["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_what_pods_refer_to_is_made():
    made = {(document["kind"], document["metadata"]["name"]) for document in load(DEPLOY / "kuberay" / "state.yaml")}
    used = set()
    for path in FILES:
        for document in load(path):
            used |= {("ServiceAccount", name) for name in find(document, "serviceAccountName")}
            used |= {("PersistentVolumeClaim", name) for name in find(document, "claimName")}
    assert used == made


def flags(command):
    parser = _parser([command])
    (choices,) = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return set(choices[command]._option_string_actions)


@pytest.mark.parametrize(("file", "words"), COMMANDS)
def test_commands_have_flags_that_there_are(file, words):
    command, *rest = words
    assert {word for word in rest if word.startswith("-")} <= flags(command)
    assert "--output" in rest


@pytest.mark.parametrize(("file", "words"), COMMANDS)
def test_slices_of_several_hosts_are_named(file, words):
    """Without --slice, the driver would refuse hosts that only work together."""
    if "--ray" not in words:
        return
    ((hosts, *_),) = [group[1:] for group in TPU_GROUPS if group[0] == file]
    assert ("--slice" in words) == (hosts > 1)
    if hosts > 1:
        assert f"-{words[words.index('--slice') + 1]}.yaml" in file


def test_the_image_is_one_word_to_replace():
    images = [image for path in FILES for document in load(path) for image in find(document, "image")]
    assert set(images) == {"IMAGE"}
    for path in FILES:
        if path.parent.name != "skypilot":
            # `sed s|IMAGE|…|` replaces the first of a line.
            assert not re.search(r"IMAGE.*IMAGE", path.read_text(encoding="utf-8")), path


def dockerfile():
    return (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def installed_extras(text):
    return {extra for found in re.findall(r"'\.\[([\w,]+)\]'", text) for extra in found.split(",")}


def test_extras_exist():
    known = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    assert installed_extras(dockerfile()) == {"tpu", "ray"} <= known
    assert installed_extras(manifest("skypilot/batch.yaml")["setup"]) == {"tpu"}


def test_the_image_has_the_ray_of_the_clusters():
    built = re.search(r"^ARG RAY_VERSION=(\S+)$", dockerfile(), re.MULTILINE).group(1)
    assert {version for path in FILES for document in load(path) for version in find(document, "rayVersion")} == {built}


def test_the_image_runs_as_a_user_and_keeps_caches_on_volumes():
    text = dockerfile()
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert users == ["comfy"]
    assert "useradd --uid 1000 --create-home comfy" in text
    volumes = re.findall(r'"(/\w+)"', re.search(r"^VOLUME (.*)$", text, re.MULTILINE).group(1))
    for name in ("HF_HOME", "JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        place = re.search(rf"\b{name}=(\S+)", text).group(1)
        assert place.startswith(tuple(volumes)), name


def test_the_image_copies_what_is_installed():
    """A file that .dockerignore leaves out cannot be part of the wheel."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {path.split("/")[0] for path in (*wheel["only-include"], *wheel["force-include"])}
    assert not needed & set(ignored)
    assert not {"constraints.txt", project["project"]["readme"], *project["project"]["license-files"]} & set(ignored)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_guide_names_every_file(name):
    text = (DEPLOY / name).read_text(encoding="utf-8")
    for path in FILES:
        assert f"`{path.relative_to(ROOT).as_posix()}`" in text
