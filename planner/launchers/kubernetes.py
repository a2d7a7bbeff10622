"""Kubernetes: a TrainJob of Kubeflow Trainer v2, with its runtime and the plan in a ConfigMap.

Pods are not restarted in place: the Job controller replaces a failed one under the same index, and
the new pod joins the others. Pods that were pre-empted or drained do not count as failures.
"""

from __future__ import annotations

import json
from pathlib import Path

from hardware_profiles.errors import InputError
from planner.launchers.job import RESTARTS, SHARED, LaunchJob, indented, node_script

PROGRAM = "kubectl"
FILE = "job.yaml"
MOUNT = "/job"  # of the ConfigMap
VARIABLES = 'nodes=$PET_NNODES rank=$PET_NODE_RANK head=$PET_MASTER_ADDR\nunset "${!PET_@}"'


def job_file(job: LaunchJob) -> str:
    """Return the documents: ConfigMap, TrainingRuntime and TrainJob."""
    image, storage = job.options.image, job.options.storage
    if not image:
        raise InputError("--on kubernetes needs --image, a container image with shardplan[run]")
    if not storage:
        raise InputError(
            "--on kubernetes needs --storage, a PersistentVolumeClaim that all nodes mount (for "
            "the run's folder)"
        )
    vendor = "amd.com" if job.accelerator.architecture.startswith("CDNA") else "nvidia.com"
    resources = f"""
    resourcesPerNode:
      limits:
        "{vendor}/gpu": "{job.ranks_per_node}\""""
    script = node_script(job, f"{SHARED}/{job.name}", f"{MOUNT}/plan.json", VARIABLES)
    name = json.dumps(job.name)
    return f"""\
apiVersion: "v1"
kind: "ConfigMap"
metadata:
  name: {name}
data:
  node.sh: |
{indented(script, 4)}
  plan.json: |
{indented(job.contents, 4)}
---
apiVersion: "trainer.kubeflow.org/v1alpha1"
kind: "TrainingRuntime"
metadata:
  name: {name}
spec:
  mlPolicy:
    numNodes: {job.nodes}
    torch: {{}}
  template:
    spec:
      replicatedJobs:
        - name: "node"
          template:
            metadata:
              labels:
                "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
            spec:
              backoffLimit: {RESTARTS * job.nodes}
              podFailurePolicy:
                rules:
                  - action: "FailJob"  # bad input: no restart would help
                    onExitCodes:
                      containerName: "node"
                      operator: "In"
                      values: [2]
                  - action: "Ignore"  # pre-empted, drained, or its machine was lost
                    onPodConditions:
                      - type: "DisruptionTarget"
                        status: "True"
              template:
                spec:
                  restartPolicy: "Never"
                  terminationGracePeriodSeconds: 120
                  containers:
                    - name: "node"
                      image: {json.dumps(image)}
                      workingDir: "{SHARED}"
                      volumeMounts:
                        - name: "job"
                          mountPath: "{MOUNT}"
                        - name: "shared"
                          mountPath: "{SHARED}"
                        - name: "shm"
                          mountPath: "/dev/shm"
                  volumes:
                    - name: "job"
                      configMap:
                        name: {name}
                    - name: "shared"
                      persistentVolumeClaim:
                        claimName: {json.dumps(storage)}
                    - name: "shm"
                      emptyDir:
                        medium: "Memory"
---
apiVersion: "trainer.kubeflow.org/v1alpha1"
kind: "TrainJob"
metadata:
  name: {name}
spec:
  runtimeRef:
    apiGroup: "trainer.kubeflow.org"
    kind: "TrainingRuntime"
    name: {name}
  trainer:
    numNodes: {job.nodes}
    image: {json.dumps(image)}
    command: ["bash", "{MOUNT}/node.sh"]{resources if job.uses_gpus else ""}
"""


def command(path: Path, job: LaunchJob) -> list[str]:
    """Return the command that creates the objects."""
    return [PROGRAM, "apply", "-f", str(path)]
