"""A job: the plan, its nodes, and the command of the executor on each node."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from hardware_profiles.cluster.schema import Accelerator
from hardware_profiles.errors import InputError
from hardware_profiles.fields import read_json
from hardware_profiles.options import Option, dashed

if TYPE_CHECKING:
    from cost_models.plan_file import PlanFile

System = Literal["slurm", "kubernetes", "skypilot", "ray", "ssh"]
PORT: Final = 29500  # first of the three ports of the rendezvous
RESTARTS: Final = 3  # of ranks by the executor, and of the job by its system
CHECKPOINT_EVERY: Final = 200  # steps
NOTICE_SECONDS: Final = 120  # from the signal to the end of a Slurm job's time
SHARED: Final = "/shared"  # where storage is mounted in containers
SYSTEMS: Final = "systems"  # title of the options in the help
# systems that an option belongs to; all others belong to every system
BELONGS: Final[dict[str, tuple[System, ...]]] = {
    "hosts": ("ssh",),
    "partition": ("slurm",),
    "time": ("slurm",),
    "image": ("kubernetes", "skypilot"),
    "storage": ("kubernetes", "skypilot"),
    "spot": ("skypilot",),
}
# options of ``run`` that a job file sets from the nodes it finds
OWN_OPTIONS: Final = ("--nodes", "--node-rank", "--rendezvous", "--elastic")
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_TIME: Final = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){1,2}|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Settings of a job that neither the plan nor the options of ``run`` give."""

    name: Annotated[
        str | None, Option(common=True, help="name of the job (default: that of the model)")
    ] = None
    elastic: Annotated[
        bool,
        Option(common=True, help="go on with fewer nodes when some are lost: plan again for them"),
    ] = False
    hosts: Annotated[
        str | None,
        Option(metavar="HOST,…", group=SYSTEMS, help="ssh: the machines; the first is node 0"),
    ] = None
    partition: Annotated[str | None, Option(group=SYSTEMS, help="slurm: the partition")] = None
    time: Annotated[
        str | None, Option(metavar="HH:MM:SS", group=SYSTEMS, help="slurm: the time limit")
    ] = None
    image: Annotated[
        str | None,
        Option(group=SYSTEMS, help="kubernetes, skypilot: container image with shardplan[run]"),
    ] = None
    storage: Annotated[
        str | None,
        Option(
            metavar="NAME",
            group=SYSTEMS,
            help=f"mounted at {SHARED}, for the run's folder; kubernetes: a PersistentVolumeClaim; "
            "skypilot: a volume, or the URL of a bucket",
        ),
    ] = None
    spot: Annotated[
        bool, Option(group=SYSTEMS, help="skypilot: spot instances, as a managed job")
    ] = False


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """A plan and the nodes that it needs."""

    name: str
    plan: Path  # absolute
    contents: str  # of plan.json
    nodes: int
    ranks_per_node: int
    gpus_per_node: int  # of the cluster; a plan may need fewer
    accelerator: Accelerator
    run_options: tuple[str, ...]  # of ``shardplan run``, as given
    options: LaunchOptions

    @property
    def uses_gpus(self) -> bool:
        """Whether nodes need accelerators (a plan for CPU processes needs none)."""
        return self.accelerator.device == "gpu"

    @property
    def ranks(self) -> int:
        """Ranks of the plan."""
        return self.nodes * self.ranks_per_node

    @property
    def node_range(self) -> tuple[int, int]:
        """Fewest and most nodes with which the job runs."""
        return (1 if self.options.elastic else self.nodes), self.nodes

    def given(self, *flags: str) -> str | None:
        """Return the value of an option of ``run``, "" for one without a value, None if absent."""
        words = self.run_options
        for index, word in enumerate(words):
            flag, equals, value = word.partition("=")
            if flag in flags:
                following = words[index + 1 : index + 2]
                return value if equals else "".join(w for w in following if w[:1] != "-")
        return None

    def executor_options(self, output: str) -> list[str]:
        """Return the options of ``run`` on every node; a restarted job resumes from checkpoints."""
        words = list(self.run_options)
        if self.given("--output", "-o") is None:
            words += ["--output", output]
        if self.given("--resume") is None:
            words.append("--resume")
        if self.given("--checkpoint-every") is None:
            words += ["--checkpoint-every", str(CHECKPOINT_EVERY)]
        if self.given("--max-restarts") is None:
            words += ["--max-restarts", str(RESTARTS)]
        return words

    def output(self, default: str) -> str:
        """Return the folder of the run."""
        return self.given("--output", "-o") or default


def job_of(
    path: Path, system: System, run_options: Sequence[str], options: LaunchOptions
) -> LaunchJob:
    """Read a plan and check the options of its job."""
    from cost_models.plan_file import read_plan_file  # imports numpy, which help does without

    for name, systems in BELONGS.items():
        if getattr(options, name) and system not in systems:
            raise InputError(f"{dashed(name)} belongs to --on {' or '.join(systems)}")
    for word in run_options:
        if word.partition("=")[0] in OWN_OPTIONS:
            raise InputError(f"{word}: launch sets it from the nodes of the job; leave it out")
    if run_options and run_options[0][:1] != "-":
        raise InputError(f"{run_options[0]!r}: options of run begin with -- (see shardplan run -h)")
    file = read_plan_file(path)
    device = file.cluster.accelerator.device
    if device == "tpu":
        raise InputError(f"{path}: {file.cluster.name}: the executor runs on GPUs and CPUs only")
    name = options.name if options.name is not None else _name_of(file.model.name)
    if not _NAME.fullmatch(name):
        allowed = "lower-case letters, digits and -, beginning with a letter, at most 40"
        raise InputError(f"--name {name!r} (must be {allowed})")
    if options.time is not None and not _TIME.fullmatch(options.time):
        raise InputError(f"--time {options.time!r} (must be minutes, HH:MM:SS or D-HH:MM:SS)")
    nodes = _nodes_of(file, path)
    return LaunchJob(
        name=name,
        plan=path.resolve(),
        contents=json.dumps(
            read_json(path, "a plan.json of shardplan plan -o"), indent=2
        ),  # ASCII, whatever it was
        nodes=nodes,
        ranks_per_node=file.plan.world_size // nodes,
        gpus_per_node=file.cluster.gpus_per_node,
        accelerator=file.cluster.accelerator,
        run_options=tuple(run_options),
        options=options,
    )


def _name_of(model: str) -> str:
    """Return a model's name as a job's.

    >>> _name_of("Qwen/Qwen3_8B")
    'qwen-qwen3-8b'
    """
    words = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return (words if words[:1].isalpha() else f"job-{words}")[:40].strip("-")


def _nodes_of(file: PlanFile, path: Path) -> int:
    """Return the fewest nodes of the cluster with equally many ranks each."""
    ranks, each = file.plan.world_size, file.cluster.gpus_per_node
    for nodes in range(-(-ranks // each), file.cluster.num_nodes + 1):
        if ranks % nodes == 0:
            return nodes
    raise InputError(
        f"{path}: {ranks} ranks cannot be spread evenly over nodes of {each} "
        f"(at most {file.cluster.num_nodes} nodes)"
    )


def quoted(words: Sequence[str]) -> str:
    """Return words for a shell, on lines of at most 100 characters.

    >>> print(quoted(["--data", "my file", "--resume"]))
    --data 'my file' --resume
    """
    lines, line = [], ""
    for word in map(shlex.quote, words):
        if line and len(line) + len(word) > 96 and word[0] == "-":
            lines.append(line)
            line = "   "
        line = f"{line} {word}" if line else word
    return " \\\n".join([*lines, line])


def plan_for_nodes(job: LaunchJob, output: str, python: str, *, waits: bool = False) -> str:
    """Return the lines of bash that choose the plan for ``$nodes`` nodes.

    They read ``$nodes`` and ``$plan``, and set ``$plan`` and the arrays ``where`` and ``options``.
    With fewer nodes than the plan has they plan again for these, or end with 2 where the job is
    not elastic. ``waits``: every node executes them, and all but node 0 (``$rank``) wait for its
    plan in the run's folder.
    """
    if job.nodes == 1:
        return f"where=()\noptions=({quoted(job.executor_options(output))})"
    lines = [
        f"options=({quoted(job.executor_options(output))})",
        f'if [ "$nodes" -lt {job.nodes} ]; then',
    ]
    if job.options.elastic:
        planned = f'{python} -m planner replan "$plan" --gpus "$ranks" -o "$new" || exit'
        make = f'    [ -e "$new" ] || {planned}'
        if waits:
            make = (
                f'    if [ "$rank" -eq 0 ]; then [ -e "$new" ] || {planned}\n'
                '    else until [ -e "$new" ]; do sleep 1; done; fi'
            )
        lines += [
            "    # plan again for the nodes that are left, and go on from the last checkpoint",
            f"    ranks=$((nodes * {job.ranks_per_node}))",
            f"    folder={shlex.quote(job.output(output))}",
            '    new="$folder/plan-for-$ranks-ranks.json"',
            '    mkdir -p "$folder"',
            make,
            '    batch() { grep -oE \'"global_batch_size": *[0-9]+\' "$1"; }',
            '    [ "$(batch "$plan")" = "$(batch "$new")" ] || options+=(--allow-other-data)',
            "    plan=$new",
        ]
    else:
        lines += [
            f'    echo "the plan needs {job.nodes} nodes, $nodes are here '
            '(launch --elastic plans again for fewer)" >&2',
            "    exit 2",
        ]
    elastic = " --elastic" * job.options.elastic
    lines += [
        "fi",
        "where=()",
        f'if [ "$nodes" -gt 1 ]; then where=(--nodes "$nodes" --rendezvous "$head:{PORT}"'
        f"{elastic}); fi",
    ]
    return "\n".join(lines)


def node_script(job: LaunchJob, output: str, plan: str, variables: str) -> str:
    """Return the bash script that a system starts on every node.

    ``variables``: lines that set ``nodes``, ``rank`` and ``head`` from the system's environment.
    """
    own = ' --node-rank "$rank"'
    return (
        f"set -u\n{variables}\nplan={shlex.quote(plan)}\n"
        f"{plan_for_nodes(job, output, 'python', waits=True)}\n"
        f'if [ "${{#where[@]}}" -gt 0 ]; then where+=({own.strip()}); fi\n'
        'exec python -m executor run "$plan" "${where[@]}" "${options[@]}"\n'
    )


def indented(text: str, spaces: int) -> str:
    """Return lines for a block of YAML."""
    return "\n".join(" " * spaces + line if line else "" for line in text.rstrip().splitlines())
