"""Machines that are reached by ssh: a bash script that starts every node and waits for node 0."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from hardware_profiles.errors import InputError
from planner.launchers.job import RESTARTS, LaunchJob, indented, plan_for_nodes

PROGRAM = "ssh"
FILE = "job.sh"


def job_file(job: LaunchJob) -> str:
    """Return the script."""
    hosts = [host.strip() for host in (job.options.hosts or "").split(",") if host.strip()]
    if len(hosts) != job.nodes or len(set(hosts)) < len(hosts):
        given = job.options.hosts or "missing"
        wanted = "one host" if job.nodes == 1 else f"{job.nodes} different hosts"
        raise InputError(f"--hosts {given}: the plan needs {wanted}")
    for host in hosts:
        if host.startswith("-") or host != shlex.quote(host):
            raise InputError(f"--hosts {host!r}: not the name of a host")
    output = str(Path.cwd() / "runs" / job.name)
    python = shlex.quote(sys.executable)
    elastic = job.options.elastic
    enough = (
        '[ "$nodes" -gt 0 ] || exit 5' if elastic else f'[ "$nodes" -eq {job.nodes} ] || exit 5'
    )
    return f"""\
#!/bin/bash
# Folder, plan and Python have to be at the same place on all machines.

set -u
hosts=({" ".join(hosts)})
here={shlex.quote(str(Path.cwd()))}
ssh=(ssh -tt -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10)
started=()
trap 'kill "${{started[@]}}" 2>/dev/null' EXIT

attempt() {{
    local present=() host rank where plan={shlex.quote(str(job.plan))}
    for host in "${{hosts[@]}}"; do
        if "${{ssh[@]}}" "$host" true </dev/null >/dev/null 2>&1
        then present+=("$host"); else echo "$host does not answer" >&2; fi
    done
    local nodes=${{#present[@]}}
    {enough}
    local head=${{present[0]#*@}}
{indented(plan_for_nodes(job, output, python), 4)}
    started=()
    for rank in "${{!present[@]}}"; do
        local words=({python} -m executor run "$plan" "${{where[@]}}" "${{options[@]}}")
        if [ "$nodes" -gt 1 ]; then words+=(--node-rank "$rank"); fi
        "${{ssh[@]}}" "${{present[rank]}}" \\
            "cd $(printf %q "$here") && exec $(printf '%q ' "${{words[@]}}")" </dev/null &
        started+=($!)
    done
    wait "${{started[0]}}"
}}

for number in {" ".join(map(str, range(RESTARTS + 1 if elastic else 1)))}; do
    attempt
    code=$?
    case $code in
        5 | 255)  # the run failed, or node 0 was lost: go on with the hosts that answer
            kill "${{started[@]}}" 2>/dev/null
            wait ;;
        *) break ;;
    esac
done
wait
exit "$code"
"""


def command(path: Path, job: LaunchJob) -> list[str]:
    """Return the command that executes a script."""
    return ["bash", str(path)]
